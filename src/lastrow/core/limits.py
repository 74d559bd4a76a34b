"""The scheduler's limits, and what is refused on arrival because it could never run within them.

Contract: a request that `check_request` (and for a fork `check_fork`) lets pass can be completed once it has the pool to itself, so the
scheduler never holds one that can only wait. Nothing here looks at what runs or changes anything; errors are ValueErrors of one line
that name the request, the limit, and both numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from lastrow.core.kv_cache_manager import KVCacheManager
from lastrow.core.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step. max_model_len: prompt and output of
    one request. max_prefill_seqs: prompts (or parts of prompts) that share one step; None is max_num_seqs.
    enable_chunked_prefill: whether a prompt may be computed in several steps. max_prefill_tokens_while_decoding: prompt tokens of a
    step that also decodes, which bounds the time between two tokens of a stream; None: no bound of its own. Raises ValueError."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    max_prefill_seqs: int | None = None
    enable_chunked_prefill: bool = True
    max_prefill_tokens_while_decoding: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prefill_seqs", "max_prefill_tokens_while_decoding"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: at least 1 is needed")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: at least max_num_seqs={self.max_num_seqs} is needed, "
                "one token for every running request"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: without chunked prefill at least "
                f"max_model_len={self.max_model_len} is needed"
            )

    @property
    def prefill_limit(self) -> int:
        return self.max_num_seqs if self.max_prefill_seqs is None else self.max_prefill_seqs

    def max_output_tokens(self, request: Request) -> int:
        """How many tokens the request may get: 0 if it samples none, else max_tokens, cut to what its prompt leaves of max_model_len."""
        if not request.samples:
            return 0
        room = self.max_model_len - request.num_prompt_tokens
        wanted = request.sampling_params.max_tokens
        return room if wanted is None else min(wanted, room)


def check_request(request: Request, config: SchedulerConfig, kv: KVCacheManager) -> None:
    """Raises ValueError for an empty or too long prompt, rows outside it, and more tokens than the pool of a group holds."""
    name, prompt, limit = request.request_id, request.num_prompt_tokens, config.max_model_len
    if prompt == 0:
        raise ValueError(f"request {name}: the prompt is empty, at least one token is needed")
    rows = request.prompt_rows
    if rows and not (0 <= rows[0] <= rows[-1] < prompt and (len(rows) == 1 or all(a < b for a, b in pairwise(rows)))):
        raise ValueError(f"request {name}: prompt_rows must be ascending positions of its {prompt} prompt tokens")
    samples = request.samples
    if prompt > limit - (1 if samples else 0):
        raise ValueError(
            f"request {name}: the prompt has {prompt} tokens, max_model_len={limit} allows {limit - 1} (one is left for the output)"
            if samples
            else f"request {name}: the prompt has {prompt} tokens, max_model_len={limit} allows {limit}"
        )
    # The last sampled token is never fed back, so it needs no K/V.
    most = max(prompt, prompt + config.max_output_tokens(request) - 1) if samples else prompt
    need = kv.config.blocks_needed(most, config.enable_chunked_prefill)
    for group, pool, blocks in zip(("full", "sliding"), kv.pools, need, strict=True):
        if blocks > pool.num_usable_blocks:
            raise ValueError(
                f"request {name}: {most} tokens (prompt {prompt} and output) need {blocks} blocks of the {group} group, the whole pool has "
                f"{pool.num_usable_blocks}; lower max_tokens or raise kv_cache_memory_bytes or gpu_memory_utilization"
            )


def check_fork(request: Request, parent: Request, num_tokens: int) -> None:
    """Raises ValueError unless the request's first num_tokens tokens are the parent's, known, and may be shared."""
    name = request.request_id
    if not 0 < num_tokens < request.num_prompt_tokens or num_tokens > parent.num_known_tokens:
        raise ValueError(
            f"request {name}: fork_num_tokens is {num_tokens}: 1 to {min(request.num_prompt_tokens - 1, parent.num_known_tokens)} is needed"
        )
    if request.cache_salt != parent.cache_salt:
        raise ValueError(f"request {name}: a fork needs the cache_salt of its parent {parent.request_id}")
    if request.prompt_rows and request.prompt_rows[0] < num_tokens:
        raise ValueError(f"request {name}: prompt_rows starts at {request.prompt_rows[0]}, inside the {num_tokens} shared tokens")
    whole = num_tokens == parent.num_prompt_tokens
    if request.prompt_token_ids[:num_tokens] != (parent.prompt_token_ids if whole else parent.token_ids(0, num_tokens)):
        raise ValueError(f"request {name}: its first {num_tokens} tokens are not those of its parent {parent.request_id}")
