"""The bundled drafter as transformers runs it, beside the bundled model as transformers runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lastrow.harness.direct import Chunk, DirectRunner
from lastrow.harness.reference import load_reference
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.rows import QueryRows
from lastrow.models.assistant_config import from_folder
from lastrow.models.config import from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.gemma4_assistant import Gemma4Assistant
from lastrow.weights.assistant import load_assistant_weights
from lastrow.weights.loader import load_model_weights

transformers = pytest.importorskip("transformers")
STEPS = 4


@torch.inference_mode()
def their_drafts(model: Any, drafter: Any, prompt: list[int]) -> tuple[int, list[int]]:
    """The token behind the prompt and four drafts behind it."""
    out = model(torch.tensor([prompt]), use_cache=True, output_hidden_states=True, return_shared_kv_states=True)
    hidden, token, drafts = out.hidden_states[-1][:, -1:], out.logits[0, -1].argmax(), []
    first, embed = int(token), model.get_input_embeddings()
    for _ in range(STEPS):
        step = drafter(
            inputs_embeds=torch.cat([embed(token.view(1, 1)), hidden], -1), position_ids=torch.tensor([[len(prompt)]]),
            attention_mask=torch.ones(1, len(prompt) + 1, dtype=torch.long), shared_kv_states=dict(out.shared_kv_states.items()),
        )  # fmt: skip
        hidden, token = step.last_hidden_state, step.logits[0, 0].argmax()
        drafts.append(int(token))
    return first, drafts


def test_bundled_drafts_are_those_of_transformers(tiny_e: Path, heldout: list[dict[str, Any]]) -> None:
    """Prompts shorter than the window, where transformers' W + 1 keys and our W are the same keys."""
    rows = [r for r in heldout if r["task"] in ("chat", "json", "decide", "think", "prose") and len(r["prompt_ids"]) < 128][::40]
    prompts = [row["prompt_ids"] for row in rows]
    folder, ops = tiny_e.parent / "tiny-e-assistant", ReferenceOps()
    shape, config = from_file(tiny_e), from_folder(folder)
    target = Gemma4Model(shape, load_model_weights(tiny_e, shape, ops.pack_gate_up, torch.float32, "cpu"), ops, 160)
    drafter = Gemma4Assistant(config, load_assistant_weights(folder, config, ops.pack_gate_up, torch.float32, "cpu"), target)
    runner = DirectRunner(target, 128, sequences=len(prompts))
    hidden = runner.forward([Chunk(p, 0, [len(p) - 1], i) for i, p in enumerate(prompts)])
    token = target.logits(hidden).argmax(-1).to(torch.int32)
    lengths = tuple(len(p) for p in prompts)
    index = torch.arange(len(prompts), dtype=torch.int32)
    query = QueryRows(torch.tensor(lengths, dtype=torch.int32) - 1, index, runner.tables, (1,) * len(prompts), lengths, len(prompts))
    drafts = drafter.draft(token, hidden, query, runner.pool, STEPS).tolist()
    reference = load_reference(tiny_e)
    theirs = transformers.Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert len(prompts) >= 4
    for prompt, first, mine in zip(prompts, token.tolist(), drafts, strict=True):
        expected_first, expected = their_drafts(reference, theirs, prompt)
        assert first == expected_first
        assert mine == expected
