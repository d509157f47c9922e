"""Media: what the encoder may do in one step, and the room for what it makes."""

from __future__ import annotations

from math import inf

from services.engine.limits import CoreConfig
from services.engine.request import MediaItem
from tests.engine.oracle.choice import Choice


class Encoder:
    """Outputs that are kept, by hash."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.kept: dict[bytes, int] = {}  # embeddings
        self.idle: list[bytes] = []  # that no choice holds, the longest idle first
        self.spent = 0  # embeddings of this step
        self.encoded: list[bytes] = []  # in this step
        self.dropped: list[bytes] = []  # since the last step

    def begin(self) -> None:
        self.spent = 0
        self.encoded = []

    def reached(self, choice: Choice, start: int, end: int) -> list[MediaItem]:
        """Items that tokens from `start` up to `end` reach into and that the choice does not hold."""
        items = choice.asked.spec.media
        reached = [item for item in items if item.offset < end and start < item.offset + item.length]
        return [item for item in reached if item not in choice.holds]

    def clip(self, choice: Choice, start: int, tokens: int) -> int:
        """How many of these tokens have their embeddings, or get them in this step."""
        held = {key: size for key, size in self.kept.items() if key not in self.idle}
        room = left(self.config.encoder_cache_size, sum(held.values()))
        time = left(self.config.encoder_budget, self.spent)
        wanted = encodes = 0
        for item in self.reached(choice, start, start + tokens):
            if item.hash in held:
                continue
            held[item.hash] = item.embeddings
            wanted += item.embeddings
            is_first = encodes == 0
            if item.hash not in self.kept:
                encodes += item.embeddings
            if wanted > room or encodes > time:
                waits = is_first and not choice.running and item.embeddings > min(room, time)
                return 0 if waits else max(0, item.offset - start)
        return tokens

    def encode(self, choice: Choice, start: int, tokens: int) -> None:
        """The choice holds what its tokens reach into; what is missing is encoded in this step."""
        reached = self.reached(choice, start, start + tokens)
        choice.holds += reached
        self.idle = [key for key in self.idle if key not in {item.hash for item in reached}]
        for item in reached:
            if item.hash in self.kept:
                continue
            while item.embeddings > left(self.config.encoder_cache_size, sum(self.kept.values())):
                dropped = self.idle.pop(0)
                del self.kept[dropped]
                self.dropped.append(dropped)
            self.kept[item.hash] = item.embeddings
            self.spent += item.embeddings
            self.encoded.append(item.hash)

    def has_room_without(self, urgent: Choice, running: list[Choice], victims: list[Choice]) -> bool:
        """Whether the first item that is not kept has room beside what the others hold."""
        first = next((item for item in urgent.asked.spec.media if item.hash not in self.kept), None)
        if first is None:
            return True
        stay = {item.hash for choice in running if choice not in victims for item in choice.holds}
        held = sum(self.kept[key] for key in stay)
        return first.embeddings <= left(self.config.encoder_cache_size, held)

    def let_go(self, choice: Choice, end: int | None, live: list[Choice]) -> None:
        """Items that end at `end` or before are over for the choice; without an end, all."""
        for item in list(choice.holds):
            if end is None or item.offset + item.length <= end:
                choice.holds.remove(item)
                if not any(other.hash == item.hash for each in live for other in each.holds):
                    self.idle.append(item.hash)


def left(limit: int | None, used: int) -> float:
    """Embeddings; without a limit there is no end of them."""
    return inf if limit is None else limit - used
