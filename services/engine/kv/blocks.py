"""The block pool: who holds a block, which is free, and what a prefix index finds in them.

    held by n requests          free, content known             free, content void
    refs = n, not queued        refs = 0, queued, indexed       refs = 0, queued, not indexed

The free queue runs from the block to be given out next to the one freed last. A freed block keeps
its content and its place in the index until it is given out again.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks 0 to num_blocks - 1. The queue is a ring linked through two lists, closed by one more element."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * num_blocks
        self.names: list[bytes | None] = [None] * num_blocks  # under which the index finds it
        self._index: dict[bytes, int] = {}
        self._end = num_blocks
        self._after = [*range(1, num_blocks + 1), 0]
        self._before = [num_blocks, *range(num_blocks)]

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks, each held once. The caller has seen that there are as many."""
        after = self._after
        taken = []
        block = after[self._end]
        for _ in range(count):
            name = self.names[block]
            if name is not None:
                del self._index[name]
                self.names[block] = None
            self.refs[block] = 1
            taken.append(block)
            block = after[block]
        after[self._end] = block
        self._before[block] = self._end
        self.num_free -= count
        return taken

    def hold(self, block: int) -> None:
        """Holds a block once more; a free one leaves the queue."""
        if self.refs[block] == 0:
            before, after = self._before[block], self._after[block]
            self._after[before] = after
            self._before[after] = before
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
            before = self._end if self.names[block] is None else self._before[self._end]
            after = self._after[before]
            self._after[before] = self._before[after] = block
            self._before[block], self._after[block] = before, after
            self.num_free += 1

    def find(self, name: bytes) -> int | None:
        """A block with this content, held or free."""
        return self._index.get(name)

    def index(self, block: int, name: bytes) -> None:
        """Lets a held block be found. If another has the same content, that one stays the one found."""
        if self._index.setdefault(name, block) == block:
            self.names[block] = name

    def forget_free(self) -> int:
        """Free blocks cannot be found any more; how many could be."""
        found = [(name, block) for name, block in self._index.items() if self.refs[block] == 0]
        for name, block in found:
            del self._index[name]
            self.names[block] = None
        return len(found)

    @property
    def num_indexed(self) -> int:
        """Blocks that can be found."""
        return len(self._index)

    def free_blocks(self) -> list[int]:
        """The free queue, next one first."""
        queue = []
        block = self._after[self._end]
        while block != self._end:
            queue.append(block)
            block = self._after[block]
        return queue
