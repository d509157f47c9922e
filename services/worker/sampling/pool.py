"""Device memory for what rows keep: words of one tensor, handed out in pieces and taken back.

|  piece  | free |  piece  | piece |        free        |     first fit; neighbours that are free are one
"""

from __future__ import annotations

import bisect

import torch

_STEP = 16
"""Words that a piece is a multiple of: pieces begin on lines of 64 bytes."""


class Pool:
    """Grows by doubling: what lies in it is copied on the device, in the order of the stream."""

    def __init__(self, device: torch.device, words: int = 2**16) -> None:
        self.words_N = torch.empty(-(-words // _STEP) * _STEP, dtype=torch.int32, device=device)
        self._free: list[tuple[int, int]] = [(0, len(self.words_N))]  # begin and end, in order
        self._pieces: dict[int, int] = {}  # end by begin

    @property
    def nbytes(self) -> int:
        """Of the tensor, used or not."""
        return self.words_N.nbytes

    @property
    def used(self) -> int:
        """Words handed out."""
        return sum(end - begin for begin, end in self._pieces.items())

    def take(self, words: int) -> int:
        """The first word of a new piece, whose content is undefined. May replace `words_N`."""
        words = -(-words // _STEP) * _STEP
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= words:
                self._free[index : index + 1] = [(begin + words, end)] if end - begin > words else []
                self._pieces[begin] = begin + words
                return begin
        self._grow(words)
        return self.take(words)

    def reserve(self, words: int) -> None:
        """Grows to at least as many words in all."""
        if words > len(self.words_N):
            self._grow(words - len(self.words_N))

    def give(self, begin: int) -> None:
        """Takes a piece back. Raises KeyError if there is none at `begin`."""
        self._release(begin, self._pieces.pop(begin))

    def _release(self, begin: int, end: int) -> None:
        at = bisect.bisect(self._free, (begin, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == begin:
            begin = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (begin, end))

    def _grow(self, least: int) -> None:
        old_N = self.words_N
        size = max(2 * len(old_N), len(old_N) + -(-least // _STEP) * _STEP)
        self.words_N = torch.empty(size, dtype=torch.int32, device=old_N.device)
        self.words_N[: len(old_N)].copy_(old_N)
        self._release(len(old_N), len(self.words_N))
