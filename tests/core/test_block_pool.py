"""BlockPool against a list-based model, and its order of eviction."""

from __future__ import annotations

import random

import pytest

from lastrow.core.block_pool import BlockPool


def test_blocks_without_a_hash_go_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    for block in (1, 2, 3):
        pool.register(block, bytes([block]))
    pool.release([3, 1, 4, 2, 5])
    assert set(pool.allocate(2)) == {4, 5}
    assert [pool.allocate(1)[0] for _ in range(3)] == [3, 1, 2]
    assert pool.num_cached_blocks == 0 and pool.lookup(bytes([1])) is None


def test_a_hit_on_a_free_block_takes_it_off_the_free_list_and_renews_it() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release([a, b])
    assert pool.num_free_of([0, a]) == 1
    pool.touch([0, a])
    pool.touch([a])
    assert pool.num_free_of([a]) == 0 and pool.num_free_blocks == 1
    pool.release([a])
    assert pool.num_free_blocks == 1
    pool.release([a])
    assert pool.allocate(1) == [b], "a was used after b"


def test_the_first_block_with_a_hash_keeps_it() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.register(a, b"x")
    pool.register(b, b"x")
    pool.register(a, b"y")
    assert pool.lookup(b"x") == a and pool.hash_of(b) is None and pool.lookup(b"y") is None


def test_asking_for_too_many_or_releasing_twice_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="3 blocks asked"):
        pool.allocate(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([block])
    assert pool.num_free_blocks == 2
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_agrees_with_a_plain_model(seed: int) -> None:
    """The model: a list of free ids in order of eviction, a count per id, a dict of hashes."""
    rng = random.Random(seed)
    pool = BlockPool(8)
    order, refs, names = list(range(1, 8)), dict.fromkeys(range(1, 8), 0), dict[int, bytes]()
    for _ in range(400):
        held = [block for block, count in refs.items() if count]
        event = rng.randrange(4)
        if event == 0:
            count = rng.randint(0, len(order))
            want, order = order[:count], order[count:]
            assert pool.allocate(count) == want
            for block in want:
                refs[block] = 1
                names.pop(block, None)
        elif event == 1 and names:
            block = rng.choice(list(names))
            assert pool.lookup(names[block]) == block
            pool.touch([block])
            refs[block] += 1
            order = [b for b in order if b != block]
        elif event == 2 and held:
            block = rng.choice(held)
            pool.release([block])
            refs[block] -= 1
            if refs[block] == 0:
                order = [*order, block] if block in names else [block, *order]
        elif event == 3 and held:
            block, name = rng.choice(held), bytes([rng.randrange(12)])
            pool.register(block, name)
            if block not in names and name not in names.values():
                names[block] = name
        pool.check_integrity(refs)
        assert pool.num_free_blocks == len(order) and pool.num_cached_blocks == len(names)
        assert all(pool.hash_of(block) == names.get(block) for block in refs)
    pool.forget_all()
    assert pool.num_cached_blocks == 0


def test_check_integrity_sees_a_lost_and_a_doubly_held_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="0 are accounted for"):
        pool.check_integrity({})
    with pytest.raises(AssertionError, match="2 are accounted for"):
        pool.check_integrity({1: 2})
