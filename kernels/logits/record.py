"""What is edited, as kernels read it: a record for each request, written once, and a line for each position of a step.

    pool   |  header  | allowed ids | ids, numbers of bias | starts, ids of banned sequences | end ids |   int32
           └ record of a row: the header's words are Word; offsets count from the record's first word
           | how often each id occurs | first places |                                                     int32
           └ what a row with penalties has seen: of each id 2 * (times in the output) + (in the prompt), then a bit for
             each place of the row, 1 where an id stands first: of its places exactly one has the bit
    lines  eight int64 for each position that is edited: Line

E edited positions   P positions   N words of the pool   R rows   L ids of a row   M masks   W words of a mask
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch


class Word(IntEnum):
    """Words of a record's header. Counts are 0, and what they count is not there, where a request does not ask."""

    ALLOWED = 0  # where the bits of allowed ids begin; 0: all are allowed
    BIAS = 1  # where ids with a bias begin; the float32 numbers lie behind the ids
    BIASES = 2
    BANNED = 3  # where the starts of banned sequences begin, one more than sequences; then their ids
    SEQUENCES = 4
    LONGEST = 5  # ids of the longest banned sequence
    ENDS = 6  # where end ids begin
    END_IDS = 7
    UNTIL = 8  # end ids are forbidden to positions before it
    FROM = 9  # the first place whose id weighs: behind the prompt where nothing is repeated
    PROMPT = 10  # ids of the prompt
    REPETITION = 11  # float32, as the next two
    FREQUENCY = 12
    PRESENCE = 13
    SIZE = 16


class Line(NamedTuple):
    """One position that is edited."""

    position: int  # its row of the logits
    row: int
    length: int  # ids that stand before it, drafts included
    known: int  # those of them that are no drafts
    record: int  # where its record begins
    mask: int = -1  # its grammar mask; -1: none
    seen: int = -1  # where what the row has seen begins; -1: it has no penalties
    counted: int = 0  # ids from here to `known` are new to what was seen; only one line of a row counts


@dataclass(slots=True, frozen=True)
class Asked:
    """What a request asks of its logits. Every id is within the vocabulary."""

    prompt_len: int
    allowed_ids: Sequence[int] = ()
    banned_sequences: Sequence[Sequence[int]] = ()
    end_ids: Sequence[int] = ()
    until: int = 0  # the first position that may hold an end id
    bias: Sequence[tuple[int, float]] = ()  # of two for one id the last counts
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


class Edit(NamedTuple):
    """What the kernels of one step read, and the logits that they edit."""

    x_PV: torch.Tensor  # float32
    tokens_RL: torch.Tensor  # int32: the ids of each row
    pool_N: torch.Tensor  # int32
    lines_E8: torch.Tensor  # int64
    masks_MW: torch.Tensor  # int32: 1 allows, lowest bit first


class Logits(Protocol):
    """What edits logits, in place: reference and triton. What an edit forbids becomes -inf.

    The order that counts is grammar mask, allowed ids, banned sequences, end ids, bias, penalties. What is -inf stays
    so under bias and penalties, which are finite: so what forbids may come later, but for one thing. Whether a grammar
    allows nothing but an end is seen when all others have forbidden.
    """

    def edit_ids(self, edit: Edit) -> None:
        """Adds bias; forbids what completes a banned sequence, and end ids of positions without a grammar mask."""

    def forbid(self, edit: Edit) -> torch.Tensor:
        """Forbids what grammar masks and allowed ids leave out.

        Returns [E, any] float32 for `forbid_ends`: the largest logits beside the end ids, where a mask comes with them.
        """

    def forbid_ends(self, edit: Edit, left_EB: torch.Tensor) -> None:
        """Forbids end ids of positions with a grammar mask, where something else is left."""

    def count(self, edit: Edit, most: int) -> None:
        """Counts ids that are new: `most` of a row at most."""

    def penalize(self, edit: Edit, longest: int) -> None:
        """Repetition, frequency and presence penalties; `longest` is the largest length of a position."""


def mask_words(vocabulary: int) -> int:
    """Words of a bit for each id."""
    return -(-vocabulary // 32)


def seen_words(vocabulary: int, max_len: int) -> int:
    """Words of what a row with penalties has seen."""
    return vocabulary + mask_words(max_len)


def pack(asked: Asked, vocabulary: int) -> torch.Tensor:
    """A record: int32. Raises ValueError naming the field whose id is outside the vocabulary."""
    header = [0] * Word.SIZE
    parts: list[torch.Tensor] = []
    end = int(Word.SIZE)

    def place(values: torch.Tensor) -> int:
        nonlocal end
        parts.append(values)
        end += len(values)
        return end - len(values)

    bias = dict(asked.bias)
    sequences = [list(ids) for ids in asked.banned_sequences if ids]
    flat = [token for ids in sequences for token in ids]
    ends = sorted(set(asked.end_ids)) if asked.until > asked.prompt_len else []
    for name, ids in (
        ("allowed_ids", asked.allowed_ids), ("logit_bias", bias), ("banned_sequences", flat), ("end_ids", ends)
    ):  # fmt: skip
        if not all(0 <= token < vocabulary for token in ids):
            raise ValueError(f"{name} has an id outside [0, {vocabulary})")
    if asked.allowed_ids:
        header[Word.ALLOWED] = place(_bits(asked.allowed_ids, vocabulary))
    if bias:
        header[Word.BIAS] = place(_ints(list(bias)))
        header[Word.BIASES] = len(bias)
        place(_bits_of(list(bias.values())))
    if sequences:
        starts = [0]
        for ids in sequences:
            starts.append(starts[-1] + len(ids))
        header[Word.BANNED] = place(_ints(starts))
        header[Word.SEQUENCES] = len(sequences)
        header[Word.LONGEST] = max(map(len, sequences))
        place(_ints(flat))
    if ends:
        header[Word.ENDS] = place(_ints(ends))
        header[Word.END_IDS] = len(ends)
        header[Word.UNTIL] = asked.until
    header[Word.FROM] = 0 if asked.repetition != 1 else asked.prompt_len
    header[Word.PROMPT] = asked.prompt_len
    weights = _bits_of([asked.repetition, asked.frequency, asked.presence])
    header[Word.REPETITION : Word.PRESENCE + 1] = weights.tolist()
    return torch.cat((_ints(header), *parts))


def _bits(ids: Sequence[int], vocabulary: int) -> torch.Tensor:
    """A bit for each id of the vocabulary, 1 where it is among `ids`."""
    among = torch.zeros(mask_words(vocabulary) * 32, dtype=torch.int64)
    among[torch.tensor(ids)] = 1
    words = (among.view(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _bits_of(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(torch.int32)
