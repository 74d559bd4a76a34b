"""Named boundary cases of the block tables: windows, hits, salts, forks. The random search is in test_scheduler_stateful.py."""

from __future__ import annotations

import random

import pytest

from core.scheduler_harness import Harness
from lastrow.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from lastrow.core.limits import SchedulerConfig
from lastrow.core.output import FULL_GROUP, SLIDING_GROUP
from lastrow.core.request import Request
from lastrow.core.sampling_params import SamplingParams
from lastrow.core.stats import cache_status


def make(block_size: int = 4, window: int = 8, full: int = 60, sliding: int = 60, max_tokens: int = 200, **kw: object) -> Harness:
    kv = KVCacheConfig(block_size, full, sliding, window, **{k: kw.pop(k) for k in ("has_full", "has_sliding") if k in kw})  # type: ignore[arg-type]
    return Harness(kv, SchedulerConfig(8, max_tokens, 200), **kw)  # type: ignore[arg-type]


def sliding_table(harness: Harness, request: Request) -> list[int]:
    return harness.manager.block_ids(request)[SLIDING_GROUP]


def computed(harness: Harness, prompt: list[int], **kw: object) -> Request:
    """A request that has run to its end and left its blocks in the cache."""
    request = harness.add(harness.request(prompt, max_tokens=1, **kw))
    harness.drain()
    return request


def admitted(harness: Harness, prompt: list[int], **kw: object) -> Request:
    request = harness.add(harness.request(prompt, **({"max_tokens": 1} | kw)))
    harness.schedule()
    return request


@pytest.mark.parametrize(
    ("block_size", "window", "length", "first_live"),
    [
        (4, 8, 7, 0),  # the query at 7 still sees 0
        (4, 8, 8, 0),  # exactly one window computed: the query at 8 sees 1..8
        (4, 8, 10, 0),  # the query at 10 sees 3..10
        (4, 8, 11, 1),  # the query at 11 sees 4..11: block 0 has just gone out
        (4, 6, 9, 1),  # window not a multiple of the block: 9 sees 4..9
        (4, 6, 8, 0),  # 8 sees 3..8
        (4, 5, 8, 1),
        (4, 1, 4, 1),  # a window of one token sees only itself
        (1, 3, 5, 3),
        (4, 4, 4, 0),  # exactly one block
    ],
)
def test_a_sliding_block_is_freed_when_the_next_query_cannot_see_it_and_not_before(
    block_size: int, window: int, length: int, first_live: int
) -> None:
    harness = make(block_size, window)
    request = admitted(harness, [1] * length, max_tokens=9)
    harness.deliver()
    assert 0 not in sliding_table(harness, request), "the prompt's own step reads all its blocks"
    harness.schedule()
    table = sliding_table(harness, request)
    assert [block == 0 for block in table] == [i < first_live for i in range(len(table))]
    pool = harness.manager.pools[SLIDING_GROUP]
    assert pool.num_usable_blocks - pool.num_free_blocks == len(table) - first_live
    assert 0 not in harness.manager.block_ids(request)[FULL_GROUP]
    harness.drain()


def test_a_long_decode_holds_only_one_window_of_sliding_blocks() -> None:
    harness = make(block_size=4, window=8, sliding=1 + 3)
    request = admitted(harness, [1, 2, 3], max_tokens=60)
    for _ in range(58):
        harness.step()
        assert sum(1 for block in sliding_table(harness, request) if block) <= 3
    harness.drain()


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_the_last_prompt_token_is_recomputed_and_all_before_it_can_hit(block_size: int) -> None:
    harness = make(block_size)
    prompt = [i % 3 for i in range(13)]
    computed(harness, prompt)
    assert admitted(harness, prompt).num_cached_tokens == 12, "prompt-1 is a multiple of the block"
    harness.drain()
    assert admitted(harness, prompt[:12]).num_cached_tokens == 12 - block_size, "a hit of the whole prompt would leave no row"


def test_a_prompt_of_exactly_one_block_is_found_by_a_longer_one_only() -> None:
    harness = make(block_size=4)
    computed(harness, [1, 2, 3, 0])
    assert admitted(harness, [1, 2, 3, 0]).num_cached_tokens == 0
    assert admitted(harness, [1, 2, 3, 0, 0]).num_cached_tokens == 4


def test_a_hit_needs_the_last_window_of_the_sliding_group_and_no_more() -> None:
    """Window 8, block 4: a hit of n blocks needs the sliding blocks that hold 4n-7 .. 4n-1, i.e. n-2 and n-1."""
    harness = make(block_size=4, window=8)
    prompt = [i % 3 for i in range(33)]
    computed(harness, prompt)
    manager, request = harness.manager, harness.request(prompt)
    hit = manager.match_prefix(request)
    assert hit.num_tokens == 32
    assert [block != 0 for block in hit.block_ids[SLIDING_GROUP]] == [False] * 6 + [True] * 2
    ids = [manager.pools[SLIDING_GROUP].lookup(block_hash) for block_hash in request.block_hashes]
    assert None not in ids

    def evict(*indices: int) -> int:
        for i in indices:
            manager.pools[SLIDING_GROUP]._forget(ids[i])  # type: ignore[arg-type]
        return manager.match_prefix(request).num_tokens

    assert evict(5) == 32, "out of the window of every later query"
    assert evict(6) == 20, "n=8 and n=7 need block 6, n=6 needs block 5; n=5 needs 3 and 4"
    assert evict(3) == 12, "n=5 and n=4 need block 3"
    assert evict(0, 1, 2) == 0


def test_a_hit_needs_every_block_of_the_full_group() -> None:
    harness = make(block_size=4, window=8)
    prompt = [i % 3 for i in range(33)]
    computed(harness, prompt)
    request = harness.request(prompt)
    harness.manager.match_prefix(request)
    pool = harness.manager.pools[FULL_GROUP]
    pool._forget(pool.lookup(request.block_hashes[2]))  # type: ignore[arg-type]
    assert harness.manager.match_prefix(request).num_tokens == 8


@pytest.mark.parametrize("seed", range(6))
def test_the_hit_is_the_longest_prefix_by_brute_force(seed: int) -> None:
    """Any blocks of either group may be gone; position by position, a prefix of n blocks is usable if what it needs is there."""
    rng = random.Random(seed)
    for _ in range(40):
        size, window, length = rng.choice([1, 2, 3, 4]), rng.randint(1, 13), rng.randint(2, 40)
        harness = make(size, window, full=1 + length, sliding=1 + length)
        prompt = [rng.randrange(3) for _ in range(length)]
        computed(harness, prompt)
        manager, request = harness.manager, harness.request(prompt)
        manager.match_prefix(request)
        present: list[set[int]] = [set(), set()]
        for group in (0, 1):
            for i, block_hash in enumerate(request.block_hashes):
                block = manager.pools[group].lookup(block_hash)
                if block is not None and rng.random() < 0.15 * (1 + group):
                    manager.pools[group]._forget(block)
                elif block is not None:
                    present[group].add(i)
        longest = 0
        for n in range(1, (length - 1) // size + 1):
            full = all(p // size in present[0] for p in range(n * size))
            sliding = all(p // size in present[1] for p in range(max(0, n * size - window + 1), n * size))
            longest = n * size if full and sliding else longest
        assert manager.match_prefix(request).num_tokens == longest


@pytest.mark.parametrize(("rows", "cached"), [((), 12), ((12,), 12), ((11,), 8), ((8, 12), 8), ((0,), 0), ((7,), 4)])
def test_a_hit_stays_before_the_first_wanted_row(rows: tuple[int, ...], cached: int) -> None:
    harness = make(block_size=4)
    computed(harness, [1] * 13)
    assert admitted(harness, [1] * 13, prompt_rows=rows).num_cached_tokens == cached
    harness.drain()


def test_salts_never_share() -> None:
    harness = make(block_size=2)
    prompt, salts = [1, 2, 3, 0, 1, 2, 3], (None, "", "a", "b")
    for salt in salts:
        assert admitted(harness, prompt, cache_salt=salt).num_cached_tokens == 0
        harness.drain()
    for salt in salts:
        assert admitted(harness, prompt, cache_salt=salt).num_cached_tokens == 6
        harness.drain()


def test_hashes_depend_on_everything_before_the_block() -> None:
    manager = KVCacheManager(KVCacheConfig(2, 10, 10, 4))

    def last_hash(tokens: list[int], salt: str | None = None) -> bytes:
        request = Request("r", tokens, SamplingParams(), cache_salt=salt)
        manager.match_prefix(request)
        return request.block_hashes[-1]

    seen = [
        last_hash([1, 2, 3, 4, 0]),
        last_hash([1, 3, 3, 4, 0]),
        last_hash([2, 1, 3, 4, 0]),
        last_hash([1, 2, 4, 3, 0]),
        last_hash([3, 4, 0]),
        last_hash([3, 4, 3, 4, 0]),
        last_hash([1, 2, 3, 4 + 2**16, 0]),
        last_hash([1, 2, 3, 4, 0], ""),
        last_hash([1, 2, 3, 4, 0], "none"),
    ]
    assert len(set(seen)) == len(seen) and all(len(value) == 32 for value in seen)
    assert last_hash([1, 2, 3, 4, 9]) == seen[0]


def test_blocks_are_found_from_the_step_after_the_one_that_fills_them() -> None:
    harness = make(block_size=4)
    prompt = [1] * 13
    first, second = (harness.add(harness.request(prompt, max_tokens=5)) for _ in range(2))
    harness.schedule()
    third = harness.add(harness.request(prompt, max_tokens=5))
    harness.schedule()
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 0, 12)
    harness.drain()


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    harness = make(block_size=2)
    request = harness.add(harness.request([1, 2, 3], max_tokens=6))
    harness.drain()
    tokens = request.prompt_token_ids + request.output_token_ids
    # The last sampled token was never fed, so 8 of the 9 tokens have K/V.
    assert admitted(harness, [*tokens, 1, 2]).num_cached_tokens == 8


def test_the_beginning_of_a_prompt_outlives_its_end() -> None:
    harness = make(block_size=4, window=8, full=1 + 4, sliding=1 + 8)
    prompt = [i % 3 for i in range(16)]
    computed(harness, prompt)
    computed(harness, [3, 3, 3, 3, 3, 3, 3, 3])
    request = harness.request([*prompt, 1])
    assert harness.manager.match_prefix(request).num_tokens == 8, "the two new blocks took blocks 3 and 2, not 0 and 1"


def test_without_caching_nothing_is_found_or_kept() -> None:
    harness = make(block_size=4, caching=False)
    computed(harness, [1] * 13)
    assert admitted(harness, [1] * 13).num_cached_tokens == 0
    assert cache_status(harness.manager)["groups"]["full"]["cached"] == 0


def test_a_reset_forgets_everything() -> None:
    harness = make(block_size=4)
    computed(harness, [1] * 13)
    harness.manager.reset_prefix_cache()
    assert admitted(harness, [1] * 13).num_cached_tokens == 0


@pytest.mark.parametrize(("has_full", "has_sliding"), [(True, False), (False, True)])
def test_a_model_without_owners_in_a_group_has_no_blocks_and_an_empty_table_there(has_full: bool, has_sliding: bool) -> None:
    harness = make(block_size=4, has_full=has_full, has_sliding=has_sliding)
    request = admitted(harness, [1] * 13, max_tokens=3)
    tables = harness.manager.block_ids(request)
    absent = FULL_GROUP if not has_full else SLIDING_GROUP
    assert tables[absent] == [] and len(tables[1 - absent]) == 4
    assert harness.manager.pools[absent].num_usable_blocks == 0 and harness.manager.pools[absent].usage == 0.0
    harness.drain()
    assert admitted(harness, [1] * 13).num_cached_tokens == 12
    harness.drain()


@pytest.mark.parametrize("shared", [7, 8, 9, 12, 13])
def test_a_fork_shares_whole_blocks_and_copies_the_rest_in_the_parents_own_step(shared: int) -> None:
    harness = make(block_size=4, window=6)
    parent = harness.add(harness.request([1] * 13, label_token_ids=()))
    child = harness.add(harness.request([1] * shared + [2, 3], max_tokens=3), parent.request_id, shared)
    step = harness.schedule()
    assert [(p.request, p.start, p.num_tokens) for p in step.scheduled] == [(parent, 0, 13), (child, shared, 2)]
    assert child.num_cached_tokens == shared and step.num_decodes == 0
    whole, rest = divmod(shared, 4)
    tables, parent_tables = step.scheduled[1].block_ids, step.scheduled[0].block_ids
    first = (shared - 5) // 4
    assert tables[0][:whole] == parent_tables[0][:whole] and tables[1][first:whole] == parent_tables[1][first:whole]
    want = [(g, parent_tables[g][whole], tables[g][whole], rest) for g in (0, 1)] if rest else []
    assert list(step.scheduled[1].copies) == want
    assert not set(tables[0][whole:]) & set(parent_tables[0]) and not set(tables[1][whole:]) & set(parent_tables[1])
    harness.drain()


def test_a_forks_first_part_is_no_decode_part_even_if_it_is_one_token() -> None:
    harness = make(block_size=4)
    parent = harness.add(harness.request([1] * 8, label_token_ids=()))
    harness.add(harness.request([1] * 8 + [2], max_tokens=3), parent.request_id, 8)
    step = harness.schedule()
    assert [part.num_tokens for part in step.scheduled] == [8, 1] and step.num_decodes == 0
    harness.deliver()
    assert harness.schedule().num_decodes == 1
    harness.drain()


def test_a_fork_of_a_fork_waits_a_step_for_the_copy_it_would_copy_from() -> None:
    harness = make(block_size=4)
    parent = harness.add(harness.request([1] * 6, label_token_ids=()))
    child = harness.add(harness.request([1] * 6 + [2], max_tokens=2), parent.request_id, 6)
    grandchild = harness.add(harness.request([1] * 6 + [2, 3], max_tokens=2), child.request_id, 7)
    other = harness.add(harness.request([3, 3], max_tokens=2))
    assert [part.request for part in harness.schedule().scheduled] == [parent, child, other]
    step = harness.schedule()
    assert [part.request for part in step.scheduled] == [child, other, grandchild]
    assert step.scheduled[2].copies and step.scheduled[2].start == 7
    harness.drain()


def test_a_copys_source_is_nobodys_until_the_step_is_complete() -> None:
    """The parent ends, the fork holds its half block alone; in the fork's first step another request takes the last blocks."""
    harness = make(block_size=4, window=4, full=1 + 4, sliding=1 + 4)
    parent = harness.add(harness.request([1] * 6, max_tokens=9))
    harness.schedule()
    child = harness.add(harness.request([1] * 6 + [2], max_tokens=1), parent.request_id, 6)
    harness.end(parent)
    source = harness.manager._blocks[child.request_id].pending[0][1]
    harness.add(harness.request([3] * 7, max_tokens=1))
    harness.in_flight.clear()
    step = harness.schedule()
    assert step.scheduled[0].request is child and step.scheduled[0].copies[0][1] == source
    assert all(source not in part.block_ids[0] for part in step.scheduled)
    assert harness.manager.pools[FULL_GROUP].ref_counts[source] == 0, "given back once the step is fixed"
    harness.drain()


def test_a_fork_from_before_the_parents_window_is_computed_like_any_request() -> None:
    harness = make(block_size=2, window=4, caching=False)
    parent = harness.add(harness.request([1] * 12, max_tokens=30))
    for _ in range(6):
        harness.step()
    child = harness.add(harness.request([1] * 4 + [2], max_tokens=2), parent.request_id, 4)
    assert child.num_computed_tokens == 0
    late = harness.add(harness.request([1] * 12 + [2], max_tokens=2), parent.request_id, 11)
    assert late.num_computed_tokens == 0, "11 - 4 + 1 = 8 is in a block that the parent's position has passed"
    harness.drain()


def test_there_is_nothing_to_fork_beyond_the_computed_tokens_or_without_blocks() -> None:
    harness = make(block_size=4)
    parent, child = harness.add(harness.request([1] * 9, max_tokens=3)), harness.request([1] * 10 + [2])
    assert not harness.manager.fork(parent, child, 4), "the parent has not run"
    harness.schedule()
    assert not harness.manager.fork(parent, child, 10) and not harness.manager.fork(parent, child, 0)
    assert not harness.manager.holds_blocks(child) and child.num_computed_tokens == 0
    assert harness.manager.fork(parent, child, 9)
    harness.manager.free(child)
    child.num_computed_tokens = 0
    harness.drain()


def test_forked_blocks_survive_their_parent_and_are_shared_once_by_all_siblings() -> None:
    harness = make(block_size=4, window=8)
    parent = harness.add(harness.request([1] * 20, label_token_ids=()))
    children = [harness.add(harness.request([1] * 20 + [i % 3], max_tokens=4), parent.request_id, 20) for i in range(5)]
    harness.step()
    assert parent.is_finished and all(child.num_computed_tokens == 21 for child in children)
    pool = harness.manager.pools[FULL_GROUP]
    assert pool.num_usable_blocks - pool.num_free_blocks == 5 + 5, "five shared blocks and one own block each"
    harness.drain()


def test_the_config_names_what_is_wrong() -> None:
    for kw, text in (
        ({"block_size": 0}, "block_size is 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_full_blocks": 1}, "num_full_blocks is 1"),
        ({"num_sliding_blocks": 1}, "num_sliding_blocks is 1"),
        ({"has_full": False, "has_sliding": False}, "has_full and has_sliding"),
    ):
        with pytest.raises(ValueError, match=text):
            KVCacheConfig(**({"block_size": 4, "num_full_blocks": 9, "num_sliding_blocks": 9, "sliding_window": 8} | kw))  # type: ignore[arg-type]
    KVCacheConfig(4, 9, 1, 0, has_sliding=False)
    KVCacheConfig(4, 1, 9, 8, has_full=False)


@pytest.mark.parametrize(
    ("num_tokens", "chunked", "want"), [(1, True, (1, 1)), (9, True, (3, 3)), (40, True, (10, 3)), (40, False, (10, 10))]
)
def test_blocks_needed_is_the_most_blocks_one_window_can_touch(num_tokens: int, chunked: bool, want: tuple[int, int]) -> None:
    assert KVCacheConfig(4, 99, 99, 8).blocks_needed(num_tokens, chunked) == want
