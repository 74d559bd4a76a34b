"""The parity comparison catches each of the 19 wrong models of tiny-e's README, and passes the right one.

Held-out items are teacher-forced along the reference's greedy output: the comparison is of the logits of every output row and of the
tokens. Tolerance: right models differ from transformers by at most 2e-4 on these items (measured below 1e-4; fp32 rounding), the
gentlest wrong one ("embedding scale 13.875") by 0.05; 2e-3 is ten times the one and a twentieth of the other. That one and "window 129"
change no greedy token of these items: tokens alone would not catch them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lastrow.harness.direct import DirectRunner
from lastrow.harness.reference import load_reference, reference_logits
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.rope import rope_table
from lastrow.models.config import Gemma4Config, from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.weights import ModelWeights
from lastrow.weights.loader import load_model_weights

pytest.importorskip("transformers")
TOLERANCE = 2e-3
MAX_TOKENS = 1024
# one item a task where that is enough; recite and tool prompts are longer than the window of 128, retrieval far longer
ITEMS = [("chat", 0), ("multiturn", 1), ("tool_call", 1), ("tool_answer", 0), ("decide", 0), ("json", 0), ("think", 0), ("retrieval", 4),
         ("recite", 0), ("recite", 1)]  # fmt: skip


class Setup:
    """What a mutation may change before the model is built and after."""

    def __init__(self, config: Gemma4Config, weights: ModelWeights) -> None:
        self.config, self.weights, self.ops = config, weights, ReferenceOps()
        self.after: Callable[[Gemma4Model], None] = lambda model: None
        self.drop_bos = False

    def model(self) -> Gemma4Model:
        model = Gemma4Model(self.config, self.weights, self.ops, MAX_TOKENS)
        self.after(model)
        return model


def set_config(**fields: Any) -> Callable[[Setup], None]:
    def change(s: Setup) -> None:
        s.config = replace(s.config, **fields)

    return change


def scalars_left_out(s: Setup) -> None:
    for layer in s.weights.layers:
        layer.scalar = torch.ones(1)


def other_donor(s: Setup) -> None:
    s.config = replace(s.config)
    s.config.__dict__["kv_source"] = (0, 1, 2, 3, 4, 2, 2, 2, 2, 4)


def full_layers_windowed(s: Setup) -> None:
    class Windowed(ReferenceOps):
        def attention(self, q, kv, rows, block_table, window):
            return super().attention(q, kv, rows, block_table, window or 128)

    s.ops = Windowed()


def rope(full: bool, frequency: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Setup], None]:
    """Replace the table of one layer type by that of `frequency`, a function of the pair index."""

    def change(s: Setup) -> None:
        def after(model: Gemma4Model) -> None:
            pair = torch.arange((s.config.global_head_dim if full else s.config.head_dim) // 2, dtype=torch.float32)
            angle = torch.arange(MAX_TOKENS, dtype=torch.float32)[:, None] * frequency(pair)
            model.rope[full] = torch.stack([angle.cos(), angle.sin()], 1)

        s.after = after

    return change


def classic_partial(pair: torch.Tensor) -> torch.Tensor:
    return torch.where(pair < 8, 1e6 ** (-pair / 8), torch.zeros_like(pair))  # the exponent runs over the rotated width


def v_norm_left_out(s: Setup) -> None:
    class NoVNorm(ReferenceOps):
        def qkv_epilogue(self, qkv, *args, **kwargs):
            out = super().qkv_epilogue(qkv, *args, **kwargs)
            kv = kwargs.get("kv")
            if kv is not None:
                values = qkv[:, -kv.v[0, 0].numel() :]
                kv.v.flatten(0, 1)[kwargs["slots"].long()] = values.view(-1, *kv.v.shape[2:])
            return out

    s.ops = NoVNorm()


def scaled_attention(s: Setup) -> None:
    class Scaled(ReferenceOps):
        def attention(self, q, kv, rows, block_table, window):
            return super().attention(q * q.shape[-1] ** -0.5, kv, rows, block_table, window)

    s.ops = Scaled()


def norm_weights_plus_one(s: Setup) -> None:
    s.weights.norm = s.weights.norm + 1
    s.weights.ple_projection_norm = s.weights.ple_projection_norm + 1
    for layer in s.weights.layers:
        for name in layer.__slots__:
            if name.endswith("norm") and getattr(layer, name) is not None:
                setattr(layer, name, getattr(layer, name) + 1)


def ple_table_times(factor: float) -> Callable[[Setup], None]:
    def change(s: Setup) -> None:
        s.weights.ple_table = s.weights.ple_table.float() * factor

    return change


def ple_context_zero(s: Setup) -> None:
    s.weights.ple_projection_norm = torch.zeros_like(s.weights.ple_projection_norm)


def bf16_embedding_scale(s: Setup) -> None:
    s.after = lambda model: setattr(model, "embed_scale", 13.875)


def no_bos(s: Setup) -> None:
    s.drop_bos = True


MISTAKES: dict[str, Callable[[Setup], None]] = {
    "layer_scalar not applied": scalars_left_out,
    "sliding consumers read layer 2, not 3": other_donor,
    "window 127": set_config(sliding_window=127),
    "window 129": set_config(sliding_window=129),
    "window 64": set_config(sliding_window=64),
    "no window at all": set_config(sliding_window=4096),
    "full layers windowed too": full_layers_windowed,
    "full rope: all pairs rotate": rope(True, lambda pair: 1e6 ** (-pair / 32)),
    "full rope: classic partial exponent": rope(True, classic_partial),
    "full rope: theta 1e4": rope(True, lambda pair: torch.where(pair < 8, 1e4 ** (-pair / 32), torch.zeros_like(pair))),
    "sliding rope: theta 1e6": rope(False, lambda pair: 1e6 ** (-pair / 16)),
    "v_norm left out": v_norm_left_out,
    "attention scale 1/sqrt(d)": scaled_attention,
    "norm weight 1 + w": norm_weights_plus_one,
    "PLE lookup zero": ple_table_times(0.0),
    "PLE context zero": ple_context_zero,
    "PLE lookup unscaled": ple_table_times(32**-0.5),
    "embedding scale 13.875 (bf16 root)": bf16_embedding_scale,
    "no <bos>": no_bos,
}


@pytest.fixture(scope="module")
def expected(tiny_e: Path, heldout: list[dict[str, Any]]) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """(item, transformers' fp32 logits of its output rows), teacher-forced."""
    reference = load_reference(tiny_e)
    by_key = {(d["task"], d["id"]): d for d in heldout}
    rows = []
    for key in ITEMS:
        item = by_key[key]
        logits = reference_logits(reference, item["prompt_ids"] + item["output_ids"])
        rows.append((item, logits[len(item["prompt_ids"]) - 1 : -1].clone()))
    return rows


def compare(setup: Setup, expected: list[tuple[dict[str, Any], torch.Tensor]]) -> tuple[float, int]:
    """(largest logit difference, items whose greedy output changes) of the model in `setup`."""
    runner = DirectRunner(setup.model(), MAX_TOKENS)
    largest, changed = 0.0, 0
    for item, reference in expected:
        prompt = item["prompt_ids"][1:] if setup.drop_bos else item["prompt_ids"]
        rows = range(len(prompt) - 1, len(prompt) + len(item["output_ids"]) - 1)
        logits = runner.all_logits(prompt + item["output_ids"], rows)
        largest = max(largest, float((logits - reference).abs().max()))
        changed += logits.argmax(-1).tolist() != item["output_ids"]
    return largest, changed


def fresh(tiny_e: Path) -> Setup:
    config = from_file(tiny_e)
    return Setup(config, load_model_weights(tiny_e, config, ReferenceOps.pack_gate_up, torch.float32, "cpu"))


def test_the_right_model_passes(tiny_e: Path, expected: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
    largest, changed = compare(fresh(tiny_e), expected)
    assert largest < 2e-4 and changed == 0


def test_the_replaced_rope_tables_differ_from_the_right_ones_only_by_the_mistake() -> None:
    """The mutations' own table maker, given the right frequencies, makes the right table: a mutant is caught for its reason."""
    pair = torch.arange(32, dtype=torch.float32)
    right = torch.where(pair < 8, 1e6 ** (-pair / 32), torch.zeros_like(pair))
    angle = torch.arange(64, dtype=torch.float32)[:, None] * right
    ours = rope_table(64, 1e6, 64, 8, torch.float32, "cpu")
    torch.testing.assert_close(torch.stack([angle.cos(), angle.sin()], 1), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_wrong_model_is_caught(mistake: str, tiny_e: Path, expected: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
    setup = fresh(tiny_e)
    MISTAKES[mistake](setup)
    largest, changed = compare(setup, expected)
    print(f"{mistake}: largest difference {largest:.3g}, {changed} of {len(expected)} outputs change")
    assert largest > 20 * TOLERANCE
