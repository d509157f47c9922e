"""A grammar made of arithmetic, for cores that are driven without a library.

A token is allowed where its parity is that of the number of tokens before it. From `least` tokens on the
output may end, and at `most` it must.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.request import Constraint
from tests.engine.fake_worker import MASK_BYTES, VOCABULARY, Mask

ENDS = frozenset({VOCABULARY - 1})
"""What ends an output under the grammar, and is never allowed otherwise."""


def parity(least: int, most: int, starts_after: tuple[int, ...] = ()) -> Constraint:
    return Constraint("regex", f"{least} {most}", starts_after)


def free_tokens(outputs: Sequence[int], starts_after: tuple[int, ...]) -> int | None:
    """How many outputs are free; None while all are."""
    if not starts_after:
        return 0
    for at in range(len(starts_after), len(outputs) + 1):
        if tuple(outputs[at - len(starts_after) : at]) == starts_after:
            return at
    return None


def allowed_after(constraint: Constraint, outputs: Sequence[int], ends: frozenset[int], min_tokens: int) -> Mask:
    """What may come next, by the rules as they are told to users."""
    least, most = map(int, constraint.text.split())
    free = free_tokens(outputs, constraint.starts_after)
    everything = frozenset(range(VOCABULARY))
    if free is None:
        return everything if len(outputs) >= min_tokens else everything - ends
    held = len(outputs) - free
    text = frozenset(token for token in everything - ENDS if token % 2 == held % 2) if held < most else frozenset()
    may_end = held >= least
    if len(outputs) >= min_tokens:
        return text | ends if may_end else text
    return text - ends or text or (ends if may_end else text)


class ParityMatcher:
    def __init__(self, constraint: Constraint, output: Sequence[int]) -> None:
        self.constraint = constraint
        self.outputs = list(output)
        self.error: str | None = None

    @property
    def may_end(self) -> bool:
        free = free_tokens(self.outputs, self.constraint.starts_after)
        return free is None or len(self.outputs) - free >= int(self.constraint.text.split()[0])

    def take(self, ids: Sequence[int]) -> int:
        for at, token in enumerate(ids):
            if not self.mask()[token >> 3] >> (token & 7) & 1:
                return at
            self.outputs.append(token)
        return len(ids)

    def give_back(self, count: int) -> None:
        del self.outputs[len(self.outputs) - count :]

    def mask(self) -> bytearray:
        allowed = allowed_after(self.constraint, self.outputs, frozenset(), 0)
        return bytearray(sum(1 << token for token in allowed).to_bytes(MASK_BYTES, "little"))


class ParityCompiling:
    def __init__(self, source: ParitySource, constraint: Constraint, outputs: Sequence[Sequence[int]]) -> None:
        self._source = source
        self._constraint = constraint
        self._outputs = [list(output) for output in outputs]
        self.cancelled = False

    @property
    def done(self) -> bool:
        return not self._source.busy

    @property
    def error(self) -> str | None:
        if self._constraint.text == "bad":
            return "no such grammar"
        leaves = any(ParityMatcher(self._constraint, ()).take(output) < len(output) for output in self._outputs)
        return "the output received so far leaves the grammar" if leaves else None

    @property
    def matchers(self) -> tuple[ParityMatcher, ...]:
        made = tuple(ParityMatcher(self._constraint, output) for output in self._outputs)
        self._source.matchers += made
        return made

    def cancel(self) -> None:
        self.cancelled = True


class ParitySource:
    """`busy` while nothing gets done."""

    def __init__(self) -> None:
        self.busy = False
        self.started: list[ParityCompiling] = []
        self.matchers: list[ParityMatcher] = []

    def start(
        self, kind: str, text: str, starts_after: tuple[int, ...], outputs: Sequence[Sequence[int]]
    ) -> ParityCompiling:
        self.started.append(ParityCompiling(self, Constraint(kind, text, starts_after), outputs))
        return self.started[-1]
