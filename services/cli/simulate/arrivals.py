"""The requests of a workload in the order in which they arrive, made one by one as they are asked for."""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from services.cli.simulate.workload import Entry, Workload
from services.engine.events import Owner
from services.engine.request import MediaItem, RequestSpec

GATEWAY = 1
FIRST_PREFIX = 1 << 30
"""Token ids from here on begin shared prefixes; those below begin the part of a prompt that is its own."""
_NS = 1_000_000_000


@dataclass(slots=True, frozen=True)
class Arrival:
    """A request on its way to the engine."""

    at_ns: int
    number: int  # in the order of the file, from 1 on
    name: str
    prompt_tokens: int
    output_tokens: int
    entry: Entry

    @property
    def group(self) -> str:
        """The name that all requests of its entry share; none where it stands alone."""
        return self.entry.name or "" if self.entry.count > 1 else ""

    @property
    def deadline_ns(self) -> int | None:
        """When it ends if it has not run by then."""
        deadline_ms = self.entry.deadline_ms
        return None if deadline_ms is None else self.at_ns + round(deadline_ms * 1e6)


def arrivals(workload: Workload) -> Iterator[Arrival]:
    """Ordered by time, then by place in the file."""
    streams, number = [], 1
    for entry in workload.requests:
        streams.append(_of_entry(entry, number, workload.seed))
        number += entry.count
    return heapq.merge(*streams, key=lambda arrival: (arrival.at_ns, arrival.number))


def _of_entry(entry: Entry, first: int, seed: int) -> Iterator[Arrival]:
    drawn = not (entry.interval.is_fixed and entry.prompt_tokens.is_fixed and entry.output_tokens.is_fixed)
    chance = random.Random(f"{seed}/{first}") if drawn else _UNUSED
    at_ns = round(entry.arrival * _NS)
    for index in range(entry.count):
        number = first + index
        prompt, output = entry.prompt_tokens.draw_tokens(chance), entry.output_tokens.draw_tokens(chance)
        yield Arrival(at_ns, number, entry.name_of(number, index), prompt, output, entry)
        at_ns += round(entry.interval.draw(chance) * _NS)


_UNUSED = random.Random(0)


class Specs:
    """Makes what the engine is given. A prompt's ids say only what it shares with others:

        prefix id, 0, 1, 2, …  │  number of the request, 0, 1, 2, …
        ─── shared_prefix ───     ──────── its own ────────

    No run of ids comes twice, so nothing is found where nothing was said to be shared.
    """

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}
        self._ramp = array("i", range(1024))

    def make(self, arrival: Arrival, now_ns: int) -> RequestSpec:
        """The request as it is submitted at `now_ns`, its handle the number."""
        entry, deadline_ns = arrival.entry, arrival.deadline_ns
        return RequestSpec(
            owner=Owner(GATEWAY, arrival.number),
            token=arrival.number.to_bytes(16, "big"),
            request_id=str(arrival.number),
            prompt=self._prompt(arrival),
            sampling=b"",
            n=1,
            max_tokens=arrival.output_tokens,
            min_tokens=0,
            eos_ids=frozenset(),
            stop_ids=frozenset(),
            seed=1,
            logprobs=None,
            prompt_logprobs=None,
            priority=entry.priority,
            tenant=entry.tenant,
            deadline_s=None if deadline_ns is None else (deadline_ns - now_ns) / _NS,
            media=_media(arrival) if entry.media else (),
        )

    def _prompt(self, arrival: Arrival) -> array[int]:
        shared = arrival.entry.shared_prefix
        own = arrival.prompt_tokens
        prompt = array("i")
        if shared:
            own -= shared.tokens
            prompt.append(FIRST_PREFIX + self._prefixes.setdefault(shared.name, len(self._prefixes)))
            prompt += self._rising(shared.tokens - 1)
        if own:
            prompt.append(arrival.number)
            prompt += self._rising(own - 1)
        return prompt

    def _rising(self, count: int) -> array[int]:
        if count > len(self._ramp):
            self._ramp = array("i", range(2 * count))
        return self._ramp[:count]


def _media(arrival: Arrival) -> tuple[MediaItem, ...]:
    items = []
    for at, (offset, item) in enumerate(arrival.entry.placed_media()):
        content = f"named {item.name}" if item.name else f"item {at} of request {arrival.number}"
        digest = hashlib.sha256(content.encode()).digest()
        items.append(MediaItem(digest, "image", offset, item.embeddings, item.embeddings))
    return tuple(items)
