"""What a KV group needs of the past, and how many blocks that takes. Arithmetic alone.

Layers that look back equally far form a group. A position p of a group with a sliding window reads
the KV of (p - window, p]; with full attention (no window) that of all positions up to p. So before
a step that computes [p, end) a group with a window needs the blocks

    block    0     1     2     3     4     5
          |     |  ·  |─────|─────|──▒▒▒|▒▒   |
                   ▲ p - window + 1  ▲ p     ▲ end
                ▲ first_needed

and nothing of those before `first_needed` will be read by this step or any later one.
"""

from __future__ import annotations

import sys
from bisect import bisect_right

Windows = tuple[int | None, ...]
"""The groups of a model, in the order of the contract: tokens that attention looks back over, its own
position included; None is full attention."""
FULL: Windows = (None,)
"""The one group of most models."""


def first_needed(position: int, window: int, block_size: int) -> int:
    """The first block that the computing of a position, or of any later one, reads."""
    return max(0, position - window + 1) // block_size


def span(tokens: int, block_size: int) -> int:
    """Blocks that so many tokens in a row lie in, wherever they begin; at least one token."""
    return (tokens + block_size - 2) // block_size + 1


class Groups:
    """The KV groups of a model that computes at most `max_tokens` tokens of one request in a step."""

    def __init__(self, windows: Windows, block_size: int, max_tokens: int) -> None:
        self.windows = windows
        self.full = [group for group, window in enumerate(windows) if window is None]
        self.sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._block_size = block_size
        self._max_tokens = max_tokens

    def claim(self, start: int, end: int) -> int:
        """Blocks that a request holds at most at any one time while it computes [start, end), in steps of
        any size, not empty.

        A group with a window gives back what has left the window before it takes more.
        """
        size = self._block_size
        blocks = -(-end // size)
        total = len(self.full) * blocks
        for _, window in self.sliding:
            largest = window - 1 + min(self._max_tokens, end - start)
            total += min(blocks - first_needed(start, window, size), span(largest, size))
        return total

    def capacity(self, num_blocks: int) -> int:
        """The longest sequence, in tokens, of which one request alone can compute all; whole blocks of it.

        Without full attention it may have no end.
        """
        size = self._block_size
        endless = [span(window - 1 + self._max_tokens, size) for _, window in self.sliding]
        if not self.full and sum(endless) <= num_blocks:
            return sys.maxsize
        fits = bisect_right(range(1, num_blocks + 1), num_blocks, key=lambda blocks: self.claim(0, blocks * size))
        return fits * size
