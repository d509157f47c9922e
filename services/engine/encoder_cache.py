"""The encoder's budget and cache as a resource, both counted in embeddings.

An item is encoded whole, once, in the first step whose tokens reach into it; its embeddings are read
piece by piece as later steps compute its placeholder tokens:

    prompt       t t t [ item A . . . . ] t t [ item B . . ] t
    steps        ├─────────┤├─────┤├────────┤ ├───────────────┤
                 encodes A                    encodes B
    holds A      ├──────────────────┤

An output that no request holds stays until its room is wanted, the one unused for longest first, so
that the same item in another request costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.engine.plan import StepPlan
from services.engine.request import MediaItem, Request
from services.engine.resources import ENDLESS, Resource


@dataclass(slots=True, eq=False)
class Output:
    """What the encoder made, or makes in a step in flight, of one item."""

    item: MediaItem
    holders: set[Request] = field(default_factory=set)
    certain: bool = False  # a step that reads it has been applied
    missing: bool = False  # the worker had nothing to encode it from


class EncoderCache(Resource):
    """Gives encoder time (`budget` embeddings per step) and room for its outputs (`capacity` embeddings).

    used = sum over outputs;  used <= capacity;  idle = outputs without holders, oldest first
    """

    def __init__(self, budget: int, capacity: int) -> None:
        self.budget = budget
        self.capacity = capacity
        self.used = 0
        self._left = budget  # of the step being planned
        self._outputs: dict[bytes, Output] = {}
        self._idle: dict[bytes, None] = {}
        self._idle_used = 0
        self._encode: list[MediaItem] = []  # by the step being planned
        self._dropped: list[bytes] = []  # of which the worker does not know that they are not wanted

    @property
    def largest_item(self) -> int:
        """Embeddings of the largest item that can ever be served."""
        return min(self.budget, self.capacity)

    def concerns(self, request: Request) -> bool:
        """Only prompts with media."""
        return bool(_all(request))

    def begin(self) -> None:
        """The encoder's time is whole again."""
        self._left = self.budget

    def clip(self, request: Request, num_tokens: int, budget: int) -> int:  # noqa: ARG002 - tokens are no concern here
        """Ends before the first item for which there is no time or no room in this step.

        A waiting request does not start where that is the first item that it lacks, and others have
        the time or the room: who waits for the encoder takes no place.
        """
        time, room = self._left, self._room
        seen: set[bytes] = set()
        encodes = False
        for item in _within(request, num_tokens):
            output = self._outputs.get(item.hash)
            if item.hash in seen or (output is not None and output.holders):
                continue
            seen.add(item.hash)
            room -= item.embeddings if output is None else output.item.embeddings  # what a gateway once said of it
            time -= item.embeddings if output is None else 0
            if time < 0 or room < 0:
                waits_for_others = item.embeddings > self._left or item.embeddings > self._room
                waits = request.epoch == 0 and not encodes and waits_for_others
                return 0 if waits else max(0, item.offset - request.num_computed)
            encodes = encodes or output is None
        return num_tokens

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Holds what the tokens read, and encodes what is not there; `clip` has seen that it fits."""
        for item in _within(request, num_tokens):
            output = self._outputs.get(item.hash)
            if output is not None:
                self._hold(output, request)
        for item in _within(request, num_tokens):
            if item.hash in self._outputs:
                continue
            self._make_room(item.embeddings)
            self._left -= item.embeddings
            self.used += item.embeddings
            self._outputs[item.hash] = Output(item, {request})
            self._encode.append(item)
        return True

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:  # noqa: ARG002 - for the step as a whole
        """What the step encodes, and what the worker may forget."""
        plan.encode += self._encode
        plan.dropped_media += self._dropped
        self._encode, self._dropped = [], []

    def applied(self, request: Request, end: int) -> None:
        """Lets go of the items that have been read to their ends, unless another place of one is being read."""
        begun = [item for item in _all(request) if item.offset < request.num_computed]
        being_read = {item.hash for item in begun if item.offset + item.length > end}
        for item in begun:
            output = self._outputs.get(item.hash)
            if output is not None and request in output.holders:
                output.certain = output.certain or item.offset < end
                if item.hash not in being_read:
                    self._let_go(output, request)

    def steady_until(self, request: Request) -> int:
        """Nothing is read behind the prompt."""
        return 0 if request.num_computed < request.prompt_len else ENDLESS

    def release(self, request: Request) -> None:
        """Lets go of everything."""
        for item in _all(request):
            output = self._outputs.get(item.hash)
            if output is not None:
                self._let_go(output, request)

    def failed(self, plan: StepPlan) -> None:
        """What the steps in flight were to encode is not there, and what this one told is not known."""
        for output in [each for each in self._outputs.values() if not each.certain]:
            self._drop(output)
        self._dropped += [name for name in plan.dropped_media if name not in self._outputs]

    def missing(self, names: Sequence[bytes]) -> None:
        """The worker could not encode these; whoever has been waiting for them fails, and nobody finds them here."""
        for name in names:
            output = self._outputs.get(name)
            if output is not None:
                output.missing = True
                if not output.holders:
                    self._drop(output)

    def is_missing(self, name: bytes) -> bool:
        """Whether the worker could not encode it, for somebody who still waits for it."""
        output = self._outputs.get(name)
        return output is not None and output.missing

    def reset(self) -> None:
        """The worker is gone with all outputs."""
        self._outputs.clear()
        self._idle.clear()
        self._encode, self._dropped = [], []
        self.used = self._idle_used = 0

    def would_fit(self, request: Request, without: Sequence[Request]) -> bool:
        """Whether the first item that is not there has room besides what others hold."""
        held = sum(each.item.embeddings for each in self._outputs.values() if not each.holders.issubset(without))
        first = self._first_missing(request)
        return first is None or held + first.embeddings <= self.capacity

    def why(self, request: Request) -> str | None:
        """The item that a waiting request cannot start without."""
        item = self._first_missing(request)
        if item is None or self.would_fit(request, ()):
            return None
        return (
            f"waits for the encoder: its next item makes {item.embeddings} embeddings; "
            f"{self.used - self._idle_used} of {self.capacity} are held by running requests"
        )

    def _first_missing(self, request: Request) -> MediaItem | None:
        return next((item for item in _all(request) if item.hash not in self._outputs), None)

    @property
    def _room(self) -> int:
        """Embeddings that no holder needs."""
        return self.capacity - self.used + self._idle_used

    def _hold(self, output: Output, request: Request) -> None:
        output.holders.add(request)
        if output.item.hash in self._idle:
            del self._idle[output.item.hash]
            self._idle_used -= output.item.embeddings

    def _let_go(self, output: Output, request: Request) -> None:
        if request not in output.holders:
            return
        output.holders.remove(request)
        if not output.holders:
            self._idle[output.item.hash] = None
            self._idle_used += output.item.embeddings
            if output.missing:
                self._drop(output)

    def _make_room(self, embeddings: int) -> None:
        while self.used + embeddings > self.capacity:
            self._drop(self._outputs[next(iter(self._idle))])

    def _drop(self, output: Output) -> None:
        name, size = output.item.hash, output.item.embeddings
        del self._outputs[name], self._idle[name]
        self.used -= size
        self._idle_used -= size
        self._dropped.append(name)


def _all(request: Request) -> tuple[MediaItem, ...]:
    return request.family.spec.media


def _within(request: Request, num_tokens: int) -> Iterator[MediaItem]:
    """The items whose embeddings the next tokens read."""
    start = request.num_computed
    for item in _all(request):
        if item.offset >= start + num_tokens:
            break
        if item.offset + item.length > start:
            yield item
