"""What a budget holds: the closed form against numbers of issue 6, against the pool's tensors, and against sequences let in until full."""

from __future__ import annotations

import pytest
import torch

from lastrow.core.kv_cache_manager import NO_HIT, KVCacheConfig, KVCacheManager
from lastrow.core.request import Request
from lastrow.core.sampling_params import SamplingParams
from lastrow.harness.info import EngineLimits, describe
from lastrow.kv.layout import KV_CACHE_DTYPES, KVBudget, KVLayout, divide_budget
from lastrow.kv.pool import KVPool
from lastrow.models.shapes import named_shape

BLOCK = 16


def manager_of(layout: KVLayout, budget: KVBudget) -> KVCacheManager:
    config = KVCacheConfig(budget.block_size, budget.num_full_blocks, budget.num_sliding_blocks, layout.sliding_window)
    return KVCacheManager(config, enable_prefix_caching=False)


def let_in_until_full(manager: KVCacheManager, tokens: int, step: int) -> list[Request]:
    """Sequences of `tokens` tokens, prefilled in parts of `step`, each trimmed to its window before the next starts."""
    admitted: list[Request] = []
    while True:
        request = Request(str(len(admitted)), [3] * tokens, SamplingParams())
        manager.admit(request, NO_HIT)
        while request.num_computed_tokens < tokens:
            manager.trim(request)
            fit = manager.num_fit(request, min(step, tokens - request.num_computed_tokens))
            if not fit:
                manager.free(request)
                return admitted
            manager.allocate(request, fit)
            request.num_computed_tokens += fit
        manager.trim(request)
        admitted.append(request)


@pytest.mark.parametrize("form", KV_CACHE_DTYPES)
def test_sequences_inside_the_window_fill_the_pool_to_the_last_token(form: str) -> None:
    """A budget too small for every window: both groups hold the same tokens, but for the one or two blocks of full attention that the
    rest of a division buys; all of the sliding ones can be in use at once."""
    layout = KVLayout.of(named_shape("e2b"), form)
    budget = divide_budget(layout, 200_000_000, BLOCK, max_num_seqs=64, max_num_batched_tokens=512)
    rest = budget.num_full_blocks - budget.num_sliding_blocks
    assert rest * layout.full_bytes_per_token < layout.bytes_per_token
    manager = manager_of(layout, budget)
    requests = let_in_until_full(manager, 2 * BLOCK, step=2 * BLOCK)
    last = let_in_until_full(manager, BLOCK, step=BLOCK)  # half a sequence may be left over
    assert sum(request.num_computed_tokens for request in requests) + BLOCK * len(last) == budget.sliding_tokens
    assert [pool.num_free_blocks for pool in manager.pools] == [rest, 0]


@pytest.mark.parametrize("form", KV_CACHE_DTYPES)
@pytest.mark.parametrize("tokens", [1024, 8192, 8200])
def test_long_sequences_fit_as_often_as_info_says(form: str, tokens: int) -> None:
    """The number of `lastrow info`, against a block manager that is given sequences until it has no block left."""
    config = named_shape("e2b")
    layout = KVLayout.of(config, form)
    limits = EngineLimits(block_size=BLOCK, max_num_seqs=64, max_num_batched_tokens=512)
    budget = divide_budget(layout, 1 << 30, BLOCK, limits.max_num_seqs, limits.max_num_batched_tokens)
    admitted = len(let_in_until_full(manager_of(layout, budget), tokens, step=512))
    # info knows sequences at rest; the last one let in needs a step's room besides its window while it is being computed
    assert budget.num_sequences(layout, tokens) - 1 <= admitted <= budget.num_sequences(layout, tokens)
    document = describe(config, kv_cache_memory_bytes=1 << 30, limits=limits)["capacity"]["formats"]
    held = document["bfloat16" if form == "auto" else form]
    assert held["full_tokens"] == budget.full_tokens and held["sliding_tokens"] == budget.sliding_tokens
    if str(tokens) in held["sequences"]:
        assert held["sequences"][str(tokens)] == budget.num_sequences(layout, tokens)


@pytest.mark.parametrize("form", KV_CACHE_DTYPES)
@pytest.mark.parametrize("shape", ["e2b-eighth", "e2b"])
def test_the_pool_takes_the_bytes_of_the_closed_form(form: str, shape: str) -> None:
    """Per token the bytes of issue 6, and the tensors, scales included, take what the budget says, up to one block of each group."""
    config = named_shape(shape)
    layout = KVLayout.of(config, form)
    if shape == "e2b":
        assert (layout.full_bytes_per_token, layout.sliding_bytes_per_token) == ((6144, 12_288) if form == "auto" else (3096, 6240))
    budget = divide_budget(layout, 30_000_000, BLOCK, max_num_seqs=8, max_num_batched_tokens=64)
    pool = KVPool(config, budget, form, torch.bfloat16)
    assert pool.num_bytes == budget.num_bytes(layout)
    assert 30_000_000 - BLOCK * layout.bytes_per_token < pool.num_bytes <= 30_000_000
    readers = {i: pool.reader(i) for i in range(config.num_hidden_layers)}
    assert all(readers[i] is pool.writer(config.kv_source[i]) for i in readers)  # scales included: a reader is its source's tensors
    for layer in set(readers) - set(config.owners):
        with pytest.raises(KeyError):
            pool.writer(layer)


def test_e4b_costs_what_issue_6_says() -> None:
    for form, costs in (("auto", (16_384, 40_960)), ("int8_per_token_head", (8256, 20_800)), ("fp8_per_token_head", (8256, 20_800))):
        layout = KVLayout.of(named_shape("e4b"), form)
        assert (layout.full_bytes_per_token, layout.sliding_bytes_per_token) == costs


COPIES = 28 * 1024 + 7 * 2048  # bf16 bytes a token of E2B with copies for all 35 layers: 28 sliding ones, 7 full ones


def owners_tokens(budget_bytes: int, block_size: int) -> int:
    """Tokens that E2B's owners hold in bf16 in both groups: sequences inside the window, as many as there is memory for."""
    budget = divide_budget(KVLayout.of(named_shape("e2b")), budget_bytes, block_size, max_num_seqs=100_000, max_num_batched_tokens=8192)
    return min(budget.full_tokens, budget.sliding_tokens)


def test_owners_only_hold_seven_thirds_of_what_copies_for_all_layers_hold() -> None:
    """Issue 6: the budget that gives 553,187 tokens to an engine with copies for all 35 layers gives owners 7/3 of them, 1,290,769.67.

    The budget: that engine stores whole blocks too, 34,575 of 16 tokens for 553,187 of them. The owners are 12 sliding and 3 full
    layers, so a block costs them exactly 3/7: 34,575 x 7 / 3 = 80,675 blocks, one of which is the null block."""
    assert 7 * KVLayout.of(named_shape("e2b")).bytes_per_token == 3 * COPIES
    blocks = -(-553_187 // BLOCK)
    assert blocks == 34_575
    assert owners_tokens(blocks * BLOCK * COPIES, BLOCK) == (80_675 - 1) * BLOCK == 1_290_784
    assert 3 * 1_290_784 >= 7 * 553_187
    # Bytes for 553,187 tokens to the byte are no whole number of anybody's blocks: they end inside the 80,674th of the owners, so that not
    # even a pool without a null block would reach 7/3 of 553,187.
    assert 553_187 * COPIES // (BLOCK * COPIES * 3 // 7) == 80_673 and 80_673 * BLOCK < 7 * 553_187 / 3
    assert owners_tokens(553_187 * COPIES, BLOCK) == (80_673 - 1) * BLOCK == 1_290_752


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_seven_thirds_hold_for_every_pool_with_a_null_block_of_its_own(block_size: int) -> None:
    """Blocks of any size, B of them and a null block with copies: floor(7 (B + 1) / 3) - 1 >= 7 B / 3 + 2 / 3 for owners."""
    for blocks in (*range(1, 100), -(-553_187 // block_size)):
        tokens = owners_tokens((blocks + 1) * block_size * COPIES, block_size)
        assert 3 * tokens >= 7 * blocks * block_size


def test_a_pool_in_memory_holds_the_seven_thirds_to_the_last_slot() -> None:
    """36 blocks with copies, a null block among them, are 84 blocks of owners: every byte is allocated, and sequences of one block, let
    in until nothing is left, have every slot but those of the null block once."""
    config, bytes_ = named_shape("e2b"), 36 * BLOCK * COPIES
    layout = KVLayout.of(config)
    budget = divide_budget(layout, bytes_, BLOCK, max_num_seqs=100_000, max_num_batched_tokens=8192)
    pool = KVPool(config, budget, "auto", torch.bfloat16)
    assert pool.num_bytes == budget.num_bytes(layout) == bytes_
    manager = manager_of(layout, budget)
    requests = let_in_until_full(manager, BLOCK, step=BLOCK)
    held = sum(request.num_computed_tokens for request in requests)
    assert held == owners_tokens(bytes_, BLOCK) == 83 * BLOCK and 3 * held >= 7 * 35 * BLOCK
    tables = [sorted(block for request in requests for block in manager.block_ids(request)[group]) for group in (0, 1)]
    assert tables == [list(range(1, 84))] * 2  # no block twice
    for layer in config.owners:
        for stored in pool.writer(layer).tensors():
            stored[tables[not config.is_full(layer)]] = 1
            assert (stored[0] == 0).all() and (stored[1:] == 1).all()


def test_past_the_window_the_same_budget_holds_far_more_than_seven_thirds() -> None:
    """The engine's default of 256 sequences, in blocks of 64 as on a GPU: their windows are bounded, the rest is full attention's. In bf16
    a token past the window costs a third; in 8 bits half of that and its scales."""
    held = [
        divide_budget(KVLayout.of(named_shape("e2b"), form), 34_575 * BLOCK * COPIES, 64, max_num_seqs=256, max_num_batched_tokens=65_536)
        for form in ("auto", "int8_per_token_head")
    ]
    assert [budget.full_tokens for budget in held] == [3_446_208, 7_255_232]  # docs/kv-cache.md
    assert held[0].full_tokens > 6 * 553_187 and held[1].full_tokens > 12 * 553_187
