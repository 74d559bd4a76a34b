"""Block tables of the two KV groups: allocation, window trimming, prefix hits, forks.

Order of writes and reads. Steps run one after another on one stream, and inside a step every layer stores the K/V of all
scheduled tokens, then applies the copies, then attends. So a block may be given away when a step is scheduled although an
earlier step that reads it has not finished (the new owner's writes come later on the stream), and a block may be hit by the
next step as soon as the step that fills it is scheduled (the reads come later). Both happen only between two steps: inside
one step nothing that a scheduled part reads is released, and `end_step` makes blocks findable when the step is complete."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lastrow.core.block_pool import NULL_BLOCK, BlockPool
from lastrow.core.output import FULL_GROUP, SLIDING_GROUP
from lastrow.core.request import Request
from lastrow.core.stats import PrefixCacheStats


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """num_full_blocks, num_sliding_blocks: first dimension of the pools, the null block included; ignored for a group that
    no layer owns (has_full / has_sliding False). sliding_window: W keys, the query's own included: position p sees p-W+1 .. p."""

    block_size: int
    num_full_blocks: int
    num_sliding_blocks: int
    sliding_window: int
    has_full: bool = True
    has_sliding: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}: at least 1 is needed")
        if not (self.has_full or self.has_sliding):
            raise ValueError("has_full and has_sliding are both False: a model needs layers that own K/V")
        if self.has_sliding and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}: at least 1 is needed")
        for has, name in ((self.has_full, "num_full_blocks"), (self.has_sliding, "num_sliding_blocks")):
            if has and getattr(self, name) < 2:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 2 (the null block and one more) are needed")

    @property
    def has_group(self) -> tuple[bool, bool]:
        return self.has_full, self.has_sliding

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_live_block(self, position: int) -> int:
        """Index of the first sliding block that a query at `position` or later reads."""
        return max(0, position - self.sliding_window + 1) // self.block_size

    def blocks_needed(self, num_tokens: int, chunked: bool) -> tuple[int, int]:
        """Fewest blocks per group with which num_tokens can be computed by one request alone: all of them in the full
        group; in the sliding group the most blocks that one window can touch, if parts may be as short as one token."""
        whole = self.num_blocks(num_tokens)
        window = 1 + (self.sliding_window + self.block_size - 2) // self.block_size
        sliding = min(whole, window) if chunked else whole
        return (whole if self.has_full else 0), (sliding if self.has_sliding else 0)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that hold the first num_tokens tokens; sliding ids are 0 before the last window."""

    num_tokens: int = 0
    block_ids: tuple[list[int], list[int]] = ([], [])


NO_HIT = PrefixHit()


@dataclass(slots=True)
class _RequestBlocks:
    """tables: per group. num_trimmed: sliding entries below are 0. num_registered: blocks already offered to the hash maps.
    is_unstarted_fork: True from a fork to its first part.
    pending: (group, source block, tokens) to copy into the first own block of a fork; the source is referenced meanwhile."""

    tables: tuple[list[int], list[int]]
    num_trimmed: int = 0
    num_registered: int = 0
    is_unstarted_fork: bool = False
    pending: list[tuple[int, int, int]] = field(default_factory=lambda: [])


class KVCacheManager:
    """Gives requests their blocks. It never decides who runs: the scheduler asks `num_fit`, then allocates."""

    def __init__(self, config: KVCacheConfig, enable_prefix_caching: bool = True) -> None:
        self.config = config
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = (
            BlockPool(config.num_full_blocks if config.has_full else 1),
            BlockPool(config.num_sliding_blocks if config.has_sliding else 1),
        )
        self.prefix_cache_stats = PrefixCacheStats()
        self._blocks: dict[str, _RequestBlocks] = {}
        self._pinned: list[tuple[int, int]] = []
        self._copied: set[tuple[int, int]] = set()
        self._groups = [g for g in (FULL_GROUP, SLIDING_GROUP) if config.has_group[g]]

    # -- prefix cache ------------------------------------------------------------------------------------------------------

    def _extend_hashes(self, request: Request, count: int) -> list[bytes]:
        """The first `count` block hashes of the request's known tokens. Each covers everything before it and the salt: a
        cryptographic hash, because a collision would show one tenant another tenant's text."""
        hashes, size = request.block_hashes, self.config.block_size
        if len(hashes) < count:
            salt = request.cache_salt
            root = hashlib.sha256(b"none" if salt is None else b"salt:" + salt.encode()).digest()
            for i in range(len(hashes), count):
                tokens = request.token_ids(i * size, (i + 1) * size)
                hashes.append(hashlib.sha256((hashes[-1] if hashes else root) + array("q", tokens).tobytes()).digest())
        return hashes[:count]

    def match_prefix(self, request: Request) -> PrefixHit:
        """The longest usable prefix of a request that holds no blocks. It leaves at least the last known token and the first
        wanted prompt row to compute. Changes nothing."""
        if not self.enable_prefix_caching:
            return NO_HIT
        size = self.config.block_size
        limit = min(request.num_known_tokens - 1, request.prompt_rows[0] if request.prompt_rows else request.num_known_tokens)
        hashes = self._extend_hashes(request, limit // size)
        count, full = len(hashes), list[int]()
        if self.config.has_full:
            for block_hash in hashes:
                block = self.pools[FULL_GROUP].lookup(block_hash)
                if block is None:
                    break
                full.append(block)
            count = len(full)
        sliding: list[int] = []
        while self.config.has_sliding and count > 0:
            first = self.config.first_live_block(count * size)
            found = [self.pools[SLIDING_GROUP].lookup(block_hash) for block_hash in hashes[first:count]]
            if None not in found:
                sliding = [NULL_BLOCK] * first + [block for block in found if block is not None]
                break
            # The window of every shorter prefix that still reaches past the first missing block contains that block, too.
            count = first + found.index(None)
        return PrefixHit(count * size, (full[:count], sliding)) if count else NO_HIT

    def reset_prefix_cache(self) -> None:
        """Forgets all hashes. For the K/V of requests that go on: call it when no request is live, as after new weights."""
        for pool in self.pools:
            pool.forget_all()

    def _register(self, request: Request, blocks: _RequestBlocks) -> None:
        if not self.enable_prefix_caching:
            return
        count = min(request.num_computed_tokens, request.num_known_tokens) // self.config.block_size
        if count <= blocks.num_registered:
            return
        hashes = self._extend_hashes(request, count)
        for group in self._groups:
            for i in range(blocks.num_registered, count):
                if blocks.tables[group][i] != NULL_BLOCK:
                    self.pools[group].register(blocks.tables[group][i], hashes[i])
        blocks.num_registered = count

    # -- allocation --------------------------------------------------------------------------------------------------------

    def holds_blocks(self, request: Request) -> bool:
        return request.request_id in self._blocks

    def trim(self, request: Request) -> None:
        """Gives back the sliding blocks that no token still to be computed can see."""
        blocks = self._blocks[request.request_id]
        if not self.config.has_sliding:
            return
        # behind drafts in flight the next token's position is not known: one token comes at least
        next_position = min(request.num_computed_tokens, request.num_known_tokens)
        table, first = blocks.tables[SLIDING_GROUP], self.config.first_live_block(next_position)
        if first > blocks.num_trimmed:
            self.pools[SLIDING_GROUP].release(reversed(table[blocks.num_trimmed : first]))
            table[blocks.num_trimmed : first] = [NULL_BLOCK] * (first - blocks.num_trimmed)
            blocks.num_trimmed = first

    def num_fit(self, request: Request, limit: int, hit: PrefixHit = NO_HIT) -> int:
        """How many tokens (at most limit) the request can be given now, beyond what it has computed or what the hit holds."""
        blocks = self._blocks.get(request.request_id)
        computed = request.num_computed_tokens if blocks else hit.num_tokens
        for group in self._groups:
            table, free = self._held(group, blocks, hit)
            room = (len(table) + free) * self.config.block_size - computed
            if room < limit:
                limit = room
        return max(limit, 0)

    def can_complete(self, request: Request, hit: PrefixHit, chunked: bool) -> bool:
        """Whether the request's known tokens could all be computed with what it holds (or hits) and what is free now."""
        blocks = self._blocks.get(request.request_id)
        need = self.config.blocks_needed(request.num_tokens, chunked)
        for group in self._groups:
            table, free = self._held(group, blocks, hit)
            if need[group] > free + len(table) - table.count(NULL_BLOCK):
                return False
        return True

    def _held(self, group: int, blocks: _RequestBlocks | None, hit: PrefixHit) -> tuple[list[int], int]:
        """The table of a request that holds blocks or would hold those of its hit, and how many more are free."""
        pool = self.pools[group]
        if blocks is not None:
            return blocks.tables[group], pool.num_free_blocks
        table = hit.block_ids[group]
        return table, pool.num_free_blocks - (pool.num_free_of(table) if table else 0)

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Takes the hit's blocks for a request that holds none and sets num_computed_tokens."""
        full, sliding = list(hit.block_ids[FULL_GROUP]), list(hit.block_ids[SLIDING_GROUP])
        for group, table in ((FULL_GROUP, full), (SLIDING_GROUP, sliding)):
            self.pools[group].touch(table)
        self._blocks[request.request_id] = _RequestBlocks(
            (full, sliding), sliding.count(NULL_BLOCK), hit.num_tokens // self.config.block_size
        )
        request.num_computed_tokens = hit.num_tokens

    def allocate(self, request: Request, num_tokens: int) -> tuple[tuple[int, int, int, int], ...]:
        """Blocks for the next num_tokens tokens (as num_fit allowed). Returns the copies of a fork's first part."""
        blocks, size = self._blocks[request.request_id], self.config.block_size
        wanted = self.config.num_blocks(request.num_computed_tokens + num_tokens)
        for group in self._groups:
            table = blocks.tables[group]
            if wanted > len(table):
                table.extend(self.pools[group].allocate(wanted - len(table)))
        blocks.is_unstarted_fork = False
        if not blocks.pending:
            return ()
        copies: list[tuple[int, int, int, int]] = []
        for group, source, tokens in blocks.pending:
            destination = blocks.tables[group][request.num_computed_tokens // size]
            copies.append((group, source, destination, tokens))
            # The source stays referenced until the step is complete: nobody may be given it, and write to it, in this same step.
            self._pinned.append((group, source))
            self._copied.add((group, destination))
        blocks.pending.clear()
        return tuple(copies)

    def block_ids(self, request: Request) -> tuple[list[int], list[int]]:
        """The live (full, sliding) tables."""
        return self._blocks[request.request_id].tables

    def end_step(self, requests: Iterable[Request]) -> None:
        """Called when a step's parts are fixed: the blocks they fill can be hit from the next step on."""
        for group, source in self._pinned:
            self.pools[group].release([source])
        self._pinned.clear()
        self._copied.clear()
        if self.enable_prefix_caching:
            for request in requests:
                self._register(request, self._blocks[request.request_id])

    def free(self, request: Request) -> None:
        """Gives back everything the request holds (nothing happens if that is nothing). The tables handed out stay readable."""
        blocks = self._blocks.pop(request.request_id, None)
        if blocks is None:
            return
        self._register(request, blocks)
        for group in self._groups:
            live = blocks.tables[group][blocks.num_trimmed :] if group == SLIDING_GROUP else blocks.tables[group]
            self.pools[group].release(reversed(live))
        for group, source, _ in blocks.pending:
            self.pools[group].release([source])

    # -- forks -------------------------------------------------------------------------------------------------------------

    def fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """Lets a child that holds nothing share the parent's first num_tokens tokens, all computed by steps scheduled so far
        (the one being scheduled included). Whole blocks are shared; a last partial one is copied in the child's first part.
        False, and nothing changed, if the parent's window has already passed: the child then is an ordinary request."""
        source = self._blocks.get(parent.request_id)
        if source is None or not 0 < num_tokens <= parent.num_computed_tokens or source.pending:
            return False
        whole, rest = divmod(num_tokens, self.config.block_size)
        first = self.config.first_live_block(num_tokens) if self.config.has_sliding else 0
        if first < source.num_trimmed:
            return False
        full, sliding = source.tables
        tables = full[:whole], [NULL_BLOCK] * first + sliding[first:whole]
        blocks = _RequestBlocks(tables, num_trimmed=first, is_unstarted_fork=True)
        for group in self._groups:
            shared = tables[group][first:] if group == SLIDING_GROUP else tables[group]
            if rest:
                partial = source.tables[group][whole]
                blocks.pending.append((group, partial, rest))
                shared = [*shared, partial]
            self.pools[group].touch(shared)
        self._blocks[child.request_id] = blocks
        child.num_computed_tokens = num_tokens
        return True

    def is_unstarted_fork(self, request: Request) -> bool:
        """Whether the request shares a parent's blocks and has computed nothing itself so far."""
        return self._blocks[request.request_id].is_unstarted_fork

    def must_wait(self, request: Request) -> bool:
        """Whether a fork's source block is itself filled by a copy of the step being scheduled: copies of one step have no order."""
        if not self._copied:
            return False
        blocks = self._blocks.get(request.request_id)
        if blocks is not None:
            for group, source, _ in blocks.pending:
                if (group, source) in self._copied:
                    return True
        return False

    # -- checks ------------------------------------------------------------------------------------------------------------

    def check_integrity(self, live_requests: Iterable[Request]) -> None:
        """Raises AssertionError unless every reference is accounted for by a live request's table or pending copy, tables have
        the shape that the computed tokens imply, and every findable block that a request holds carries the hash of its tokens.
        Between steps only."""
        requests = {request.request_id: request for request in live_requests}
        refs: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        assert not self._pinned and not self._copied, "check_integrity is for between steps"
        for request_id, blocks in self._blocks.items():
            assert request_id in requests, f"request {request_id} is gone but holds blocks"
            request = requests[request_id]
            hashes = self._extend_hashes(request, min(request.num_computed_tokens, request.num_known_tokens) // self.config.block_size)
            for group in (FULL_GROUP, SLIDING_GROUP):
                table = blocks.tables[group]
                refs[group].update(block for block in table if block != NULL_BLOCK)
                refs[group].update(source for g, source, _ in blocks.pending if g == group)
                trimmed = blocks.num_trimmed if group == SLIDING_GROUP else 0
                assert all((block == NULL_BLOCK) == (i < trimmed) for i, block in enumerate(table)), f"holes in {request_id}: {table}"
                missing = self.config.num_blocks(request.num_computed_tokens) - len(table) - (1 if blocks.pending else 0)
                assert group not in self._groups or missing <= 0, f"{request_id} lacks {missing} blocks of group {group}"
                for block, block_hash in zip(table, hashes, strict=False):
                    assert self.pools[group].hash_of(block) in (None, block_hash), f"block {block} of {request_id} has a wrong hash"
        for group in (FULL_GROUP, SLIDING_GROUP):
            self.pools[group].check_integrity(refs[group])
        for request_id, request in requests.items():
            held = request.num_computed_tokens > 0 and (request.samples or request.num_computed_tokens < request.num_prompt_tokens)
            assert not held or request_id in self._blocks, f"{request_id} has computed tokens but no blocks"
