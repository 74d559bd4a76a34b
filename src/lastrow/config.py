"""EngineConfig: every engine option once. The command line, the server and `LLM(**options)` are derived from it.

Standard library only. Flag names are vLLM's where vLLM has the flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from lastrow.kv.layout import KV_CACHE_DTYPES
from lastrow.models.config import ConfigError
from lastrow.models.shapes import SHAPES

T = TypeVar("T")

LOAD_FORMATS = ("auto", "safetensors", "dummy")
DTYPES = ("auto", "bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "reference", "triton")
EMBED_WEIGHTS = ("device", "host")
SCHEDULING_POLICIES = ("fcfs", "priority")
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 8192, 65_536  # max_num_batched_tokens by device
# max_prefill_tokens_while_decoding on a GPU: 35 ms of an H200 for E2B, so that 50 ms between two tokens hold at the 99th percentile
GPU_MIXED_TOKENS = 16_384
LOOKUP = (2, 5)  # tokens that n-gram drafts look up
MAX_DRAFTS = 16  # of one step: a row of the target for every draft, more never pays
SPECULATIVE_EXAMPLE = '{"model": "FOLDER", "num_speculative_tokens": 4} or {"method": "ngram", "num_speculative_tokens": 4}'


def _flag(default: T, help: str, *, choices: Sequence[str] = (), size: bool = False) -> T:
    """A field that is a command-line flag. size: accepts 32k, 1.5m, 24G (see `parse_size`)."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "size": size})


@dataclass(frozen=True)
class SpeculativeConfig:
    """What proposes drafts, with vLLM's names. Raises ConfigError on construction.

    model: folder, hub id or tiny-e-assistant of a Gemma 4 assistant (method "assistant"; vLLM's word "mtp" means the same). Method "ngram"
    needs no model: it looks up the last prompt_lookup_min to prompt_lookup_max tokens earlier in the text (2 to 5; where one is given, the
    other moves as far as it must). num_speculative_tokens: most drafts of one step (None: the assistant's own advice, else 4). adaptive:
    ask for fewer, or for none, where drafts are rejected.

    For measuring costs without a checkpoint, with load_format dummy: model "dummy" makes random weights of the published shape, and
    simulated_acceptance keeps each draft with that probability. The tokens are then nobody's."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    adaptive: bool = True
    simulated_acceptance: float | None = None

    def __post_init__(self) -> None:
        method = self.method if self.method is not None else "ngram" if self.model is None else "assistant"
        object.__setattr__(self, "method", "assistant" if method == "mtp" else method)
        if self.method not in ("assistant", "ngram"):
            raise ConfigError(f"speculative_config.method is {self.method!r}: 'assistant' or 'ngram' is needed")
        if (self.method == "assistant") != bool(self.model):
            raise ConfigError(
                "speculative_config.model is missing: the folder of an assistant is needed, or method 'ngram'"
                if self.method == "assistant"
                else f"speculative_config.model is {self.model!r}: method 'ngram' has no model"
            )
        count = self.num_speculative_tokens
        if count is not None and not (_is_count(count) and count <= MAX_DRAFTS):
            raise ConfigError(f"speculative_config.num_speculative_tokens is {count!r}: 1 to {MAX_DRAFTS} is needed")
        rate = self.simulated_acceptance
        if rate is not None and not (_is_number(rate) and 0.0 <= rate <= 1.0):
            raise ConfigError(f"speculative_config.simulated_acceptance is {rate!r}: a probability from 0 to 1 is needed")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and self.method != "ngram":
                raise ConfigError(f"speculative_config.{name} is {value!r}: only method 'ngram' looks anything up; leave it out")
            if value is not None and not _is_count(value):
                raise ConfigError(f"speculative_config.{name} is {value!r}: a positive integer is needed")
        least, most = self.prompt_lookup
        if least > most:
            raise ConfigError(f"speculative_config.prompt_lookup_min is {least}: at most prompt_lookup_max={most} is needed")

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """prompt_lookup_min and prompt_lookup_max, the missing ones filled in."""
        least = self.prompt_lookup_min or min(LOOKUP[0], self.prompt_lookup_max or LOOKUP[1])
        return least, self.prompt_lookup_max or max(LOOKUP[1], least)

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """From a mapping or its JSON text. Raises ConfigError naming an unknown key."""
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ConfigError(f"speculative_config is no JSON ({error}): write {SPECULATIVE_EXAMPLE}") from None
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative_config is a {type(value).__name__}: write {SPECULATIVE_EXAMPLE}")
        known = [item.name for item in fields(cls)]
        if unknown := sorted(set(value) - set(known)):
            raise ConfigError(f"speculative_config.{unknown[0]} is not known: one of {', '.join(known)} is needed")
        if not isinstance(value.get("model"), str | None):
            raise ConfigError(f"speculative_config.model is {value['model']!r}: a folder, a hub id or tiny-e-assistant is needed")
        if not isinstance(value.get("adaptive", True), bool):
            raise ConfigError(f"speculative_config.adaptive is {value['adaptive']!r}: true or false is needed")
        if not value:
            raise ConfigError(f"speculative_config is empty: write {SPECULATIVE_EXAMPLE}")
        return cls(**value)


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Raises ConfigError on construction, naming the field, its value and what would be right."""

    model: str = "tiny-e"
    revision: str | None = _flag(None, "branch, tag or commit of a hub model")
    load_format: str = _flag("auto", "auto reads safetensors; dummy makes random weights and downloads nothing", choices=LOAD_FORMATS)
    shape: str | None = _flag(None, "a published size by name, instead of a model; its weights are dummies", choices=tuple(SHAPES))
    dtype: str = _flag("auto", "auto is float32 on a CPU and bfloat16 on a GPU", choices=DTYPES)
    device: str = _flag("auto", "auto takes a GPU when there is one", choices=DEVICES)
    backend: str = _flag("auto", "kernels: auto is triton on a GPU and reference (torch) on a CPU", choices=BACKENDS)
    max_model_len: int | None = _flag(None, "longest prompt plus output in tokens; default: what the model was made for", size=True)
    max_num_seqs: int = _flag(256, "most requests in one step", size=True)
    max_num_batched_tokens: int | None = _flag(None, "most tokens in one step; default: 8192 on a CPU, 65536 on a GPU", size=True)
    max_prefill_seqs: int | None = _flag(None, "most prompts that share one prefill forward; default: no limit of its own", size=True)
    max_prefill_tokens_while_decoding: int | None = _flag(
        None,
        "most prompt tokens in a step that also decodes, to bound the time between two tokens; default: 16384 on a GPU, no bound on a CPU",
        size=True,
    )
    scheduling_policy: str = _flag("fcfs", "order of waiting requests", choices=SCHEDULING_POLICIES)
    block_size: int | None = _flag(None, "tokens of one K/V block; default: 16 on a CPU, 64 on a GPU")
    kv_cache_dtype: str = _flag("auto", "storage of keys and values; auto is the model's dtype", choices=KV_CACHE_DTYPES)
    gpu_memory_utilization: float = _flag(0.9, "share of the card that weights, activations and K/V may take")
    kv_cache_memory_bytes: int | None = _flag(None, "bytes of the K/V pool; wins over --gpu-memory-utilization", size=True)
    enable_prefix_caching: bool = _flag(True, "reuse the K/V of prompts that begin alike")
    embed_weights: str = _flag(
        "device", "the per-layer embedding table: host keeps it in pinned memory, off the card; a CPU always maps it", choices=EMBED_WEIGHTS
    )
    enforce_eager: bool = _flag(False, "no CUDA graphs")
    batch_invariant: bool | None = _flag(
        None, "bit-identical results alone, in any batch and in any chunking; default: on with drafts in bfloat16, else off"
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = _flag(  # noqa: RUF009  the default is None
        None, f"drafts, as JSON: {SPECULATIVE_EXAMPLE}"
    )
    relaxed_acceptance: float | None = _flag(
        None, "lossy: inside a thought, keep drafts at least this share as likely as the best token, in (0, 1]"
    )
    seed: int = _flag(0, "seed of requests that bring none, and of dummy weights")

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        self.validate()

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """speculative_config, parsed."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    def uses_graphs(self, device_type: str) -> bool:
        """Whether forwards are captured: on CUDA, unless enforce_eager."""
        return device_type == "cuda" and not self.enforce_eager

    def for_device(self, on_gpu: bool) -> EngineConfig:
        """The options that depend on the device filled in where the user gave none. On a GPU a block holds one key tile of the
        attention kernels, and prefill speed grows with the step, which streams that decode wait for (docs/benchmarks)."""
        tokens = self.max_num_batched_tokens or max(GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS, self.max_num_seqs)
        return replace(
            self,
            block_size=self.block_size or (64 if on_gpu else 16),
            max_num_batched_tokens=tokens,
            max_prefill_tokens_while_decoding=self.max_prefill_tokens_while_decoding or (GPU_MIXED_TOKENS if on_gpu else None),
        )

    def validate(self) -> None:
        """Refuse values that no model could run with. What depends on the model is checked when its config is read."""

        def need(ok: bool, name: str, right: str) -> None:
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: {right}")

        for item in fields(self):
            choices = item.metadata.get("choices", ())
            value = getattr(self, item.name)
            need(not choices or value is None or value in choices, item.name, f"one of {', '.join(choices)} is needed")
        need(bool(self.model), "model", "a folder, a hub id or tiny-e is needed")
        need(_is_count(self.max_num_seqs), "max_num_seqs", "a positive integer is needed")
        counts = ("max_model_len", "max_prefill_seqs", "max_prefill_tokens_while_decoding", "kv_cache_memory_bytes")
        for name in (*counts, "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            need(value is None or _is_count(value), name, "None or a positive integer is needed")
        need(self.block_size is None or self.block_size & (self.block_size - 1) == 0, "block_size", "a power of two is needed")
        need(
            self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"at least max_num_seqs={self.max_num_seqs} is needed, so that every running request can decode in one step",
        )
        need(0.0 < self.gpu_memory_utilization <= 1.0, "gpu_memory_utilization", "a share in (0, 1] is needed")
        need(-(2**63) <= self.seed < 2**64, "seed", "an integer of at most 64 bits is needed")
        speculative, share = self.speculative, self.relaxed_acceptance
        need(share is None or (_is_number(share) and 0.0 < share <= 1.0), "relaxed_acceptance", "None or a share in (0, 1] is needed")
        need(share is None or speculative is not None, "relaxed_acceptance", "speculative_config is needed: without drafts it does nothing")
        real = speculative is None or (speculative.model != "dummy" and speculative.simulated_acceptance is None)
        need(real or self.load_format == "dummy", "speculative_config", "dummy or simulated drafts are for load_format=dummy")
        need(self.shape is None or self.load_format == "dummy", "shape", "a named shape has no weights: add load_format=dummy")
        right = f"only a hub model has revisions, and shape {self.shape!r} is none; leave it out"
        need(self.shape is None or self.revision is None, "revision", right)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Read a size as vLLM does: `32k` is 32,000 and `32K` 32,768; m/M, g/G, t/T likewise; `1.5k` and `1.5K` are allowed.

    Raises ValueError with what would be right."""
    number, factor = (text[:-1], SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else (text, 1)
    try:
        size = float(number) * factor if "." in number else int(number) * factor
    except ValueError:
        raise ValueError(f"{text!r} is no size: write 4096, 32k (32,000) or 32K (32,768); m, M, g, G likewise") from None
    if size != int(size):
        raise ValueError(f"{text!r} is no whole number")
    return int(size)
