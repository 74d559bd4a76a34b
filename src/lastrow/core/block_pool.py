"""The blocks of one KV group: who is free, who is referenced, and which block holds which hashed tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Block ids 1 .. num_blocks-1; id 0 is the null block, which stands for "nothing to read" and is never given out.

    num_blocks counts the null block (it is the first dimension of the pool's tensors). A block is free exactly when its
    reference count is 0. A free block may keep its hash: it can be hit until it is given out again. Free blocks are given out
    those without a hash first, then those with a hash, least recently freed first (LRU)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: at least 1 (the null block) is needed")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._plain = list(range(num_blocks - 1, 0, -1))  # free and without a hash, the next one last: given out and taken back in slices
        self._free: OrderedDict[int, None] = OrderedDict()  # free with a hash, least recently freed first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._plain) + len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._hash_of)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0..1; 0 for a pool without blocks."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks if self.num_usable_blocks else 0.0

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; a hash that such a block still had is forgotten. The caller has checked
        num_free_blocks: asking for more raises RuntimeError and changes nothing."""
        plain, refs = self._plain, self.ref_counts
        if count > self.num_free_blocks:
            raise RuntimeError(f"{count} blocks asked of a pool with {self.num_free_blocks} free ones")
        first = max(len(plain) - count, 0)
        blocks = plain[first:]
        del plain[first:]
        blocks.reverse()
        while len(blocks) < count:
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            refs[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference for each block (the null block is passed over)."""
        refs = self.ref_counts
        for block in blocks:
            count = refs[block]
            if count == 0:
                if block == NULL_BLOCK:  # its count stays 0
                    continue
                if block in self._free:
                    del self._free[block]
                else:
                    self._plain.remove(block)
            refs[block] = count + 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each block (the null block is passed over). Of the blocks that become free, the first of
        the iterable is evicted first: pass a request's blocks in reverse, so that its beginning stays longest."""
        refs, hashes = self.ref_counts, self._hash_of
        free = self._plain.append
        for block in blocks:
            left = refs[block] - 1
            if left < 0:  # the null block's count stays 0
                if block == NULL_BLOCK:
                    continue
                raise RuntimeError(f"block {block} is released more often than it was taken")
            refs[block] = left
            if left == 0:
                if block in hashes:
                    self._free[block] = None
                else:
                    free(block)

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes a held block findable. The first block with a hash keeps it: a second copy of the same tokens stays nameless
        and is reused first once it is free."""
        if block not in self._hash_of and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are free now, i.e. would leave the free list if touched."""
        return sum(1 for block in blocks if block != NULL_BLOCK and self.ref_counts[block] == 0)

    def forget_all(self) -> None:
        """No block can be hit any more; held blocks stay held, and free ones are given out in the order they had."""
        self._plain[:0] = reversed(self._free)
        self._free.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def check_integrity(self, expected_refs: dict[int, int]) -> None:
        """Raises AssertionError unless the counts are exactly the expected ones (0 where absent), the free list holds exactly
        the unreferenced blocks, and the two hash maps are each other's inverse."""
        free = Counter([*self._plain, *self._free])
        for block in range(1, self.num_blocks):
            have, want = self.ref_counts[block], expected_refs.get(block, 0)
            assert have == want, f"block {block} has {have} references, {want} are accounted for"
            assert free[block] == (have == 0), f"block {block} with {have} references is free {free[block]} times"
            assert have or (block in self._free) == (block in self._hash_of), f"free block {block} waits among the wrong ones"
        assert NULL_BLOCK not in free and self.ref_counts[NULL_BLOCK] == 0, "the null block was given out"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hash maps disagree"
