"""The KV cache as a resource: block tables, prefix hits and admission.

tokens    |  block 0  |  block 1  |  block 2  |  blo
found     |── hit ────|── hit ────|                     shared, never written
held      |───────────|───────────|───────────|         taken step by step
promised                                      |─────|   of the known tokens, not yet taken
"""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.kv.blocks import BlockPool
from services.engine.kv.hashing import ExtraKey, KeyKind, block_hash, root
from services.engine.plan import StepPlan
from services.engine.report import Counters
from services.engine.request import Request
from services.engine.resources import Resource


class KvCache(Resource):
    """Gives blocks to requests. `reserve_blocks` stay free per running request when one is admitted."""

    def __init__(
        self, num_blocks: int, block_size: int, *, reserve_blocks: int, prefix_caching: bool, counters: Counters
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._counters = counters
        self._reserve_blocks = reserve_blocks
        self._root = root(block_size)
        self._promised = 0  # over all admitted requests
        self._admitted = 0  # requests that may hold blocks

    @property
    def capacity(self) -> int:
        """Tokens that all blocks hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def available(self) -> int:
        """Blocks that a newcomer may count on. May be negative: outputs take what was promised."""
        return self.pool.num_free - self._promised - self._reserve_blocks * self._admitted

    def admit(self, request: Request) -> bool:
        """All tokens known must fit, not only the first chunk, and the reserve must stay."""
        if self.available < 0:
            return False
        known = len(request.tokens)
        hits = self._lookup(request)
        fresh = -(-known // self.block_size) - len(hits)
        leave_queue = [self.pool.refs[block] for block in hits].count(0)
        if fresh + leave_queue > self.available:
            return False
        for block in hits:
            self.pool.hold(block)
        cached = len(hits) * self.block_size
        request.blocks = hits
        request.blocks_indexed = len(hits)
        request.blocks_described = 0
        request.blocks_promised = fresh
        # Something must be computed to sample from. When every token is found, the last one runs
        # again without writing its KV, because its block is shared. Later steps lie beyond it.
        request.num_computed = min(cached, known - 1)
        request.first_writable = cached
        self._promised += fresh
        self._admitted += 1
        return True

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Takes the blocks that the tokens reach into."""
        short = request.num_computed + num_tokens - len(request.blocks) * self.block_size
        if short <= 0:
            return True
        count = -(-short // self.block_size)
        if count > self.pool.num_free:
            return False
        request.blocks += self.pool.take(count)
        kept = min(count, request.blocks_promised)
        request.blocks_promised -= kept
        self._promised -= kept
        return True

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """The blocks that the worker has not seen, and where writing begins."""
        new = len(request.blocks) - request.blocks_described
        if new == 0:
            return
        plan.block_counts[at] = new
        plan.block_ids.extend(request.blocks[-new:])
        if request.blocks_described == 0:
            plan.first_writable[at] = request.first_writable
            if request.runs == 1 and self._reads(request):
                self._counters.prefix_queries += len(request.tokens)
                self._counters.prefix_hits += request.num_computed
        request.blocks_described += new

    def applied(self, request: Request, end: int) -> None:
        """Full blocks can be found from now on: their KV is really there."""
        if end < (request.blocks_indexed + 1) * self.block_size or not self.prefix_caching:
            return
        full = end // self.block_size
        names = self._names(request, full)
        for position in range(request.blocks_indexed, full):
            self.pool.index(request.blocks[position], names[position])
        request.blocks_indexed = full

    def steady_until(self, request: Request) -> int:
        """What the blocks cover that the worker knows."""
        return request.blocks_described * self.block_size

    def would_fit(self, request: Request, without: Sequence[Request]) -> bool:
        """The sum that `admit` makes, without a look at the prefix cache; shared blocks may stay held."""
        refs = self.pool.refs
        alone = sum(refs[block] == 1 for other in without for block in other.blocks)
        promised = sum(other.blocks_promised for other in without)
        free = self.available + alone + promised + self._reserve_blocks * len(without)
        return -(-len(request.tokens) // self.block_size) <= free

    def release(self, request: Request) -> None:
        """Frees from the tail of the chain, so that its head is the last to be given out."""
        self.pool.drop(reversed(request.blocks))
        request.blocks = []
        self._promised -= request.blocks_promised
        request.blocks_promised = 0
        self._admitted -= 1

    def reset(self) -> None:
        """What the blocks held is gone; all of them are free."""
        self.pool.forget_free()

    def why(self, request: Request) -> str | None:
        """The sum that `admit` makes, without a look at the prefix cache."""
        needed = -(-len(request.tokens) // self.block_size)
        if needed <= self.available:
            return None
        return (
            f"needs {needed} KV blocks less what the prefix cache has; {max(self.available, 0)} of "
            f"{self.pool.num_blocks} are free beyond what running requests may need"
        )

    def _reads(self, request: Request) -> bool:
        return self.prefix_caching and request.family.reads_prefix

    def _lookup(self, request: Request) -> list[int]:
        """The longest run of blocks, from the first on, that hold the request's tokens."""
        hits: list[int] = []
        if self._reads(request):
            for name in self._names(request, len(request.tokens) // self.block_size):
                block = self.pool.find(name)
                if block is None:
                    break
                hits.append(block)
        return hits

    def _names(self, request: Request, count: int) -> list[bytes]:
        """At least the first `count` block names of a request; made once, as its tokens come to be known."""
        names, size = request.block_hashes, self.block_size
        while len(names) < count:
            start = len(names) * size
            salt = request.family.spec.cache_salt
            extra = (ExtraKey(KeyKind.SALT, salt.encode()),) if salt and start == 0 else ()
            names.append(block_hash(names[-1] if names else self._root, request.tokens[start : start + size], extra))
        return names
