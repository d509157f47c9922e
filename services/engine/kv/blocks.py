"""The block pool: who holds a block, which is free, and what a prefix index finds in them.

    held by n requests          free, content known             free, content void
    refs = n, not queued        refs = 0, queued, named         refs = 0, queued, no name

The free queue runs from the block to be given out next to the one freed last. A freed block keeps
its content and its place in the index until it is given out again.

All KV groups take from this one pool; each has an index of its own, from name to block. Held blocks
of a group may have equal content. One of them is found, the others are its twins:

    found[name] ─▶ 7   (held)
    twins[name] = { 9, 12 }   (held; one of them takes the place of 7 when nobody holds 7 any more)

What holds between any two calls:

    1. A block is in the queue exactly while refs = 0.
    2. A free block has a name exactly while it is the one found by it.
    3. While any holder holds a content, the block found by its name is held. So a free block has no
       twins, and a content that is there twice is given out once without a loss.
    4. Whoever holds block i of a chain with full attention holds all before it. So by 3 the held
       blocks of a chain come first:

           chain     |─ held ─|─ held ─|─ free ─|─ free ─|  not found …
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NO_PARENT = bytes(32)
"""The parent of the first block of a chain, for those who watch."""


class CacheChange(NamedTuple):
    """What became of group 0's index. `names` has the parent of each name that is found now, None where it is gone."""

    cleared: bool  # everything that was there before is gone
    names: dict[bytes, bytes | None]


class BlockPool:
    """Blocks 0 to num_blocks - 1. The queue is a ring linked through two lists, closed by one more element."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * num_blocks
        self.names: list[bytes | None] = [None] * num_blocks  # of known content
        self._parents = [NO_PARENT] * num_blocks  # of a block with a name
        self._groups = [0] * num_blocks  # of a block with a name
        self._found: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._twins: list[dict[bytes, dict[int, None]]] = [{} for _ in range(num_groups)]
        self._changes: dict[bytes, bytes | None] | None = None  # since the last look; None while nobody looks
        self._cleared = False
        self._end = num_blocks
        self._after = [*range(1, num_blocks + 1), 0]
        self._before = [num_blocks, *range(num_blocks)]

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks, each held once. The caller has seen that there are as many."""
        after = self._after
        taken = []
        block = after[self._end]
        for _ in range(count):
            if self.names[block] is not None:
                self._forget(block)
            self.refs[block] = 1
            taken.append(block)
            block = after[block]
        after[self._end] = block
        self._before[block] = self._end
        self.num_free -= count
        return taken

    def hold(self, block: int) -> None:
        """Holds a block that is found once more; a free one leaves the queue."""
        if self.refs[block] == 0:
            self._unlink(block)
            self.num_free -= 1
        self.refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Holds each block once less; those that nobody holds are freed in this order.

        One without known content goes to the front of the queue: nothing is lost with it.
        """
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            name = self.names[block]
            if name is not None and name in self._twins[self._groups[block]]:
                self._leave_to_twin(block, name)
                name = None
            self._link(block, self._end if name is None else self._before[self._end])
            self.num_free += 1

    def find(self, name: bytes, group: int = 0) -> int | None:
        """A block with this content, held or free; a held one if there is one."""
        return self._found[group].get(name)

    def index(self, block: int, name: bytes, parent: bytes = NO_PARENT, group: int = 0) -> None:
        """Says what the content of a held block is, once, and so lets it be found."""
        self.names[block], self._parents[block], self._groups[block] = name, parent, group
        found = self._found[group]
        other = found.setdefault(name, block)
        if other == block:
            if self._changes is not None and group == 0:
                self._changes[name] = parent
        elif self.refs[other]:
            self._twins[group].setdefault(name, {})[block] = None
        else:
            found[name] = block
            self.names[other] = None
            self._unlink(other)
            self._link(other, self._end)

    def forget_free(self) -> int:
        """Free blocks cannot be found any more; how many could be."""
        free = [block for found in self._found for block in found.values() if self.refs[block] == 0]
        had_any = bool(self._found[0])
        for block in free:
            self._forget(block)
        if self._changes is not None and had_any and not self._found[0]:
            self._changes.clear()
            self._cleared = True
        return len(free)

    def watch(self) -> CacheChange:
        """From now on changes of group 0's index are noted. What is in it now, as a change from nothing."""
        self._changes, self._cleared = {}, False
        return CacheChange(True, {name: self._parents[block] for name, block in self._found[0].items()})

    def take_changes(self) -> CacheChange | None:
        """What has changed since the last call, or since `watch`. None: nothing, or nobody watches.

        A name may be said to be gone that came and went since.
        """
        if not self._changes and not self._cleared:
            return None
        change = CacheChange(self._cleared, self._changes or {})
        self._changes, self._cleared = {}, False
        return change

    @property
    def num_indexed(self) -> int:
        """Blocks that can be found."""
        return sum(len(found) for found in self._found)

    def free_blocks(self) -> list[int]:
        """The free queue, next one first."""
        queue = []
        block = self._after[self._end]
        while block != self._end:
            queue.append(block)
            block = self._after[block]
        return queue

    def _forget(self, block: int) -> None:
        """The content of a free block is no longer to be found."""
        name, group = self.names[block], self._groups[block]
        assert name is not None
        del self._found[group][name]
        self.names[block] = None
        if self._changes is not None and group == 0:
            self._changes[name] = None

    def _leave_to_twin(self, block: int, name: bytes) -> None:
        """Nobody holds the block any more, but others hold its content."""
        group = self._groups[block]
        twins = self._twins[group][name]
        if self._found[group][name] == block:
            self._found[group][name] = oldest = next(iter(twins))
            del twins[oldest]
        else:
            del twins[block]
        if not twins:
            del self._twins[group][name]
        self.names[block] = None

    def _link(self, block: int, before: int) -> None:
        after = self._after[before]
        self._after[before] = self._before[after] = block
        self._before[block], self._after[block] = before, after

    def _unlink(self, block: int) -> None:
        before, after = self._before[block], self._after[block]
        self._after[before] = after
        self._before[after] = before
