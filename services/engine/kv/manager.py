"""The KV cache as a resource: block tables, prefix hits and admission, over all KV groups.

A request has one chain of blocks, and in each group a table of those that it holds of it. All tables
end at the same place; those of groups with a sliding window begin later:

    tokens          |  block 0  |  block 1  |  block 2  |  block 3  |  blo
    full attention  |── hit ────|── hit ────|───────────|───────────|
    sliding window  |           |── hit ────|───────────|───────────|
                    0           ▲ first     ▲ hits end              ▲ covered      ▲ promised until
                                            └ first_writable

Hits are shared and never written. Blocks are taken step by step. At admission all that the known
tokens will need beyond the hits is promised: no newcomer may count on it, though the outputs of those
that run may use it up. The promise to a protected request reaches up to its limit and is firm. It counts
on what leaves its sliding windows, so it shares no block of those: a shared one would not become free.

    free blocks = available + promised + reserve_blocks for each that runs, in each group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from services.engine.kv.blocks import NO_PARENT, BlockPool, CacheChange
from services.engine.kv.naming import Naming
from services.engine.kv.windows import FULL, Groups, Windows, first_needed
from services.engine.plan import StepPlan
from services.engine.report import Counters
from services.engine.request import BlockTable, Request
from services.engine.resources import ENDLESS, Resource


class KvCache(Resource):
    """Gives blocks to requests. `reserve_blocks` per group stay free per running request when one is admitted."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_batched_tokens: int,
        reserve_blocks: int,
        prefix_caching: bool,
        counters: Counters,
        windows: Windows = FULL,
    ) -> None:
        self.pool = BlockPool(num_blocks, len(windows))
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._groups = Groups(windows, block_size, max_num_batched_tokens)
        self._naming = Naming(block_size)
        self._counters = counters
        self._reserve_blocks = reserve_blocks * len(windows)
        self._promised = 0  # over all admitted requests
        self._firm = 0  # how much of that is promised firmly
        self._admitted = 0  # requests that may hold blocks

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that one request alone can have."""
        return self._groups.capacity(self.pool.num_blocks)

    @property
    def available(self) -> int:
        """Blocks that a newcomer may count on. May be negative: outputs take what was promised."""
        return self.pool.num_free - self._promised - self._reserve_blocks * self._admitted

    def admit(self, request: Request) -> bool:
        """All tokens known must fit, not only the first chunk, and the reserve must stay."""
        until = _promised_until(request)
        if self._is_hopeless(request, until):
            return False
        hits = self._lookup(request)
        cached, known = hits * self.block_size, len(request.tokens)
        # Something must be computed to sample from. When every token is found, the last one runs
        # again without writing its KV, because its block is shared. Later steps lie beyond it.
        start = min(cached, known - 1)
        tables = self._hit_tables(request, hits, start)
        shared = [block for table in tables for block in table.blocks]
        fresh = self._groups.claim(start, until) - len(shared)
        leave_queue = [self.pool.refs[block] for block in shared].count(0)
        if fresh + leave_queue > self.available:
            return False
        for block in shared:
            self.pool.hold(block)
        request.tables = tables
        request.blocks_covered = request.blocks_indexed = hits
        request.blocks_described = 0
        request.num_computed = start
        request.first_writable = cached
        request.promise_firm = request.protected
        self._promise(request, fresh)
        self._admitted += 1
        return True

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Takes the blocks that the tokens reach into, after those that left a sliding window were given back."""
        end = request.num_computed + num_tokens
        count = -(-end // self.block_size) - request.blocks_covered
        if count <= 0:
            return True
        taken = count * len(request.tables)
        if self._groups.sliding:
            self._give_back(request, taken)
        others = self._firm - request.blocks_promised if request.promise_firm else self._firm
        if taken > self.pool.num_free - others:
            return False
        for table in request.tables:
            table.blocks += self.pool.take(count)
        request.blocks_covered += count
        until = request.most_computed if request.promise_firm else len(request.tokens)
        if end < until or request.blocks_promised:
            held = sum([len(table.blocks) for table in request.tables])
            sure = min(end, len(request.tokens))  # the next step may begin there, if the drafts are wrong
            self._promise(request, max(0, self._groups.claim(sure, until) - held) if end < until else 0)
        return True

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """The blocks that the worker has not seen, and where writing begins; 0 for one that left the window."""
        seen = request.blocks_described
        new = request.blocks_covered - seen
        if new == 0:
            return
        at_group = at * len(request.tables)
        for table in request.tables:
            plan.block_counts[at_group] = new
            if seen < table.first:
                plan.block_ids.extend([0] * (table.first - seen))
            plan.block_ids.extend(table.blocks[-new:])
            at_group += 1
        if seen == 0:
            plan.first_writable[at] = request.first_writable
            self._count_prefix(request)
        request.blocks_described += new

    def applied(self, request: Request, end: int) -> None:
        """Full blocks can be found from now on: their KV is really there, and their tokens are final.

        Drafts that agreed are computed before they are known as tokens, so their block waits for the next step.
        """
        if end < (request.blocks_indexed + 1) * self.block_size or not self.prefix_caching:
            return
        first, full = request.blocks_indexed, min(end, len(request.tokens)) // self.block_size
        names = self._naming.names(request, full)
        for group, table in enumerate(request.tables):
            if request.promise_firm and self._groups.windows[group] is not None:
                continue
            for at in range(max(first, table.first), full):
                parent = names[at - 1] if at else NO_PARENT
                self.pool.index(table.blocks[at - table.first], names[at], parent, group)
        request.blocks_indexed = full

    def steady_until(self, request: Request) -> int:
        """What the blocks cover that the worker knows; they end at the same place in every group."""
        return request.blocks_described * self.block_size

    def settled_until(self, request: Request) -> int:
        """Before the end of the next block nothing enters the index."""
        return (request.blocks_indexed + 1) * self.block_size - 1 if self.prefix_caching else ENDLESS

    def would_fit(self, request: Request, without: Sequence[Request]) -> bool:
        """The sum that `admit` makes, without a look at the prefix cache, once `without` have left."""
        promised = sum(other.blocks_promised for other in without)
        needed = self._groups.claim(0, _promised_until(request))
        needed -= self.available + promised + self._reserve_blocks * len(without)
        if needed > sum(len(table.blocks) for other in without for table in other.tables):
            return False  # not even if they share no block with others: what most steps find that ask again
        holds = Counter(block for other in without for table in other.tables for block in table.blocks)
        return needed <= sum(self.pool.refs[block] == count for block, count in holds.items())

    def release(self, request: Request) -> None:
        """Frees from the tail of the chain, so that its head is the last to be given out."""
        self.pool.drop(_tail_first(request))
        request.tables = []
        request.blocks_covered = 0
        self._promise(request, 0)
        self._admitted -= 1

    def reset(self) -> None:
        """What the blocks held is gone; all of them are free."""
        self.pool.forget_free()

    def why(self, request: Request) -> str | None:
        """The sum that `admit` makes, without a look at the prefix cache."""
        needed = self._groups.claim(0, _promised_until(request))
        if needed <= self.available:
            return None
        return (
            f"needs {needed} KV blocks less what the prefix cache has; {max(self.available, 0)} of "
            f"{self.pool.num_blocks} are free beyond what running requests may need"
        )

    def watch(self) -> CacheChange:
        """From now on changes of the prefix index are noted for `take_events`. What is in it now."""
        return self.pool.watch()

    def take_events(self) -> CacheChange | None:
        """Changes of the prefix index of group 0 since the last call; None when there are none."""
        return self.pool.take_changes()

    def _promise(self, request: Request, blocks: int) -> None:
        """Promises a request so many blocks instead of what it was promised before."""
        more = blocks - request.blocks_promised
        request.blocks_promised = blocks
        self._promised += more
        if request.promise_firm:
            self._firm += more

    def _give_back(self, request: Request, taken: int) -> None:
        """Frees what has left the sliding windows, before so many blocks are taken.

        What steps in flight compute is not in the index yet. Where the pool has room it is kept until
        it is, so that long prompts computed in steps longer than the window can be found as well.
        """
        roomy = self.prefix_caching and taken <= self.pool.num_free - self._promised
        for group, window in self._groups.sliding:
            table = request.tables[group]
            first = first_needed(request.num_computed, window, self.block_size)
            left = (min(first, request.blocks_indexed) if roomy else first) - table.first
            if left > 0:
                self.pool.drop(table.blocks[:left])
                del table.blocks[:left]
                table.first += left

    def _count_prefix(self, request: Request) -> None:
        """Counts what a request found. Later runs, and later choices, find what the first one left."""
        if request.runs == 1 and self._reads(request) and sum(each.runs for each in request.family.choices) == 1:
            self._counters.prefix_queries += len(request.tokens)
            self._counters.prefix_hits += request.num_computed

    def _reads(self, request: Request) -> bool:
        shares = not (request.protected and self._groups.sliding)
        return shares and self.prefix_caching and request.family.reads_prefix

    def _is_hopeless(self, request: Request, until: int) -> bool:
        """Whether a request cannot fit, seen with a single look into the index; one that waits is asked each step.

        Only hits that others hold cost nothing, and those are the first ones of its chain. Of the blocks
        that full attention needs, `short` must be among them:

            |─ held ─|─ held ─|─ … ─|─ short - 1 ─|          is this one held?
        """
        if self.available < 0:
            return True
        full = self._groups.full
        short = -(-until // self.block_size) - self.available // len(full) if full else 0
        if short <= 0:
            return False
        if short > len(request.tokens) // self.block_size or not self._reads(request):
            return True
        block = self.pool.find(self._naming.names(request, short)[short - 1], full[0])
        return block is None or self.pool.refs[block] == 0

    def _lookup(self, request: Request) -> int:
        """Leading blocks of the chain that need no computing.

        Full attention needs all of them, a sliding window only the last ones. So full attention says how
        many there may be, and each window may say fewer, until all agree. At worst that is none.
        """
        if not self._reads(request):
            return 0
        known = len(request.tokens)
        hits = known // self.block_size
        names = self._naming.names(request, hits)
        for group in self._groups.full:
            for at, name in enumerate(islice(names, hits)):
                if self.pool.find(name, group) is None:
                    hits = at
                    break
        before = None
        while hits and hits != before:
            before = hits
            for group, window in self._groups.sliding:
                hits = self._window_hits(names, hits, known, group, window)
        return hits

    def _window_hits(self, names: list[bytes], most: int, known: int, group: int, window: int) -> int:
        """Leading blocks, at most `most`, of which a group with a window has all that the next position needs.

        |  not looked at  |─ found ─|─ found ─|─ found ─|
                          ▲ low                         ▲ hits       done when low reaches the first one needed

        At least the last one must be found, though with a window of 1 nothing is needed of it.
        """
        hits = low = most
        while hits:
            first = first_needed(min(hits * self.block_size, known - 1), window, self.block_size)
            first = min(first, hits - 1)
            while low > first and self.pool.find(names[low - 1], group) is not None:
                low -= 1
            if low <= first:
                break
            hits = low = low - 1
        return hits

    def _hit_tables(self, request: Request, hits: int, start: int) -> list[BlockTable]:
        """Per group the found blocks that computing from `start` on needs."""
        names, find = request.block_hashes, self.pool.find
        tables = []
        for group, window in enumerate(self._groups.windows):
            first = 0 if window is None else first_needed(start, window, self.block_size)
            found = [find(name, group) for name in names[first:hits]]
            tables.append(BlockTable(first, [block for block in found if block is not None]))
        return tables


def _promised_until(request: Request) -> int:
    """Tokens for which a request is promised blocks."""
    return request.most_computed if request.protected else len(request.tokens)


def _tail_first(request: Request) -> Iterator[int]:
    """The blocks of all tables, the last of the chain first."""
    if len(request.tables) == 1:
        yield from reversed(request.tables[0].blocks)
        return
    for at in reversed(range(request.blocks_covered)):
        for table in request.tables:
            if at >= table.first:
                yield table.blocks[at - table.first]
