"""Media in the conversations of one model: from parts to items that lie in a prompt.

    template's text   … <pad> …                    one placeholder for each part
    expanded          … <pad><pad><pad> …          one for each embedding; of a video with times between
    ids               … │ offset … offset + length │ …

Whose text names a placeholder is refused: nothing but a part stands for media.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from services.common.errors import InvalidArgument, internal
from services.gateway.asked import Asked
from services.gateway.fields import Caller
from services.gateway.media.door import MediaDoor
from services.gateway.media.items import MediaOptions, Processed
from services.gateway.media.prepare import Prepared
from services.gateway.media.store import Pin
from services.gateway.messages import Message
from services.gateway.parts import MediaPart, media_of
from services.gateway.processors.rules import MediaRules
from services.gateway.request import MediaItem


@dataclass(slots=True, frozen=True)
class Held:
    """Items of a prompt, and the pins of what was made of them: to be released, once, when the request has ended."""

    items: tuple[MediaItem, ...] = ()
    pins: tuple[Pin, ...] = ()

    def release(self) -> None:
        """Lets go of all of them."""
        for pin in self.pins:
            pin.release()


NOTHING = Held()


@dataclass(slots=True, frozen=True)
class Wanted:
    """The media of a conversation, and what is asked of them by modality."""

    parts: tuple[MediaPart, ...]
    options: Mapping[str, MediaOptions]
    salt: str


class Attachments:
    """The media side of one model that takes some.

    ids         of its placeholders, by modality
    modalities  those that its worker takes too
    """

    def __init__(self, rules: MediaRules, ids: Mapping[str, int], modalities: frozenset[str], door: MediaDoor) -> None:
        self._rules = rules
        self._taken = modalities
        self._door = door
        self._modalities = {token_id: modality for modality, token_id in ids.items()}
        self._placeholders = {modality: rules.placeholder(modality) for modality in ids}
        self._split = re.compile("|".join(re.escape(text) for text in self._placeholders.values()))

    def read(self, messages: Sequence[Message], options: Mapping[str, MediaOptions], asked: Asked) -> Wanted:
        """The parts of a conversation, checked as far as that needs no content."""
        parts = tuple(part for message in messages for part in media_of(message.content))
        for part in parts:
            if part.modality not in self._taken:
                raise unsupported(part)
        self._door.check_count(parts)
        return Wanted(parts, options, asked.cache_salt or "")

    def check_options(self, wanted: Wanted, caller: Caller) -> None:
        """Raises for options that the model's processor can't honour."""
        for modality in {part.modality for part in wanted.parts}:
            self._rules.check_options(wanted.options[modality], modality, caller.spell("mm_processor_kwargs"))

    def check_texts(self, messages: Sequence[Message]) -> None:
        """Raises for text of a client that would read as media."""
        for i, message in enumerate(messages):
            found = self._split.search(message.text)
            if found is not None:
                where = f"messages[{i}]"
                raise InvalidArgument(f"{where}: its text holds {found.group()}, which stands for media", field=where)

    def check_text(self, text: str, parts: Sequence[MediaPart], field: str) -> None:
        """Raises for a rendered conversation that has not one placeholder for each of its parts."""
        shown = Counter(self._split.findall(text))
        wanted = Counter(self._placeholders[part.modality] for part in parts)
        for modality, placeholder in self._placeholders.items():
            if shown[placeholder] == wanted[placeholder]:
                continue
            first = next((part.where for part in parts if part.modality == modality), field)
            raise InvalidArgument(
                f"{first}: the prompt has {shown[placeholder]} placeholders {placeholder} for {wanted[placeholder]} "
                "items: the model's chat template shows not all of them, or some text looks like one",
                field=first,
            )

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises for a prompt without media that has an id of theirs."""
        for token_id, modality in self._modalities.items():
            if token_id in ids:
                text = self._placeholders[modality]
                raise InvalidArgument(
                    f"{field}: holds {text} (id {token_id}), which stands for a part of the conversation", field=field
                )

    async def prepare(self, wanted: Wanted) -> list[Prepared]:
        """What is made of the parts, in order, pinned."""
        return await self._door.prepare(wanted.parts, self._rules.pixels, wanted.options, wanted.salt)

    def expand(self, text: str, items: Sequence[Processed]) -> str:
        """The text with all that stands for the items in place of their placeholders."""
        waiting: dict[str, deque[Processed]] = {placeholder: deque() for placeholder in self._placeholders.values()}
        for item in items:
            waiting[self._placeholders[item.modality]].append(item)
        return self._split.sub(lambda found: self._rules.expand(waiting[found.group()].popleft()), text)

    def place(
        self, ids: Sequence[int], items: Sequence[Processed], parts: Sequence[MediaPart], field: str
    ) -> list[MediaItem]:
        """Where the items of the parts lie: from the first of their ids to the last, with what stands between.

        Order among items of one modality is that of the prompt. Raises InvalidArgument where the ids are not theirs:
        a tokenizer may read other text as a placeholder too.
        """
        places: dict[str, list[int]] = {modality: [] for modality in self._placeholders}
        for index, token_id in enumerate(ids):
            if token_id in self._modalities:
                places[self._modalities[token_id]].append(index)
        begun = Counter(dict.fromkeys(places, 0))
        placed = []
        for item, part in zip(items, parts, strict=True):
            own = places[item.modality]
            first = begun[item.modality]
            last = first + item.embeddings
            if last > len(own):
                raise InvalidArgument(f"{field}: the prompt has too few placeholders for its media", field=field)
            begun[item.modality] = last
            offset, length = own[first], own[last - 1] + 1 - own[first]
            placed.append(MediaItem(item.hash, item.modality, offset, length, item.embeddings, item.grid, part.where))
        if any(begun[modality] != len(own) for modality, own in places.items()):
            raise InvalidArgument(f"{field}: some text looks like placeholders of media", field=field)
        placed.sort(key=lambda item: item.offset)
        for before, after in pairwise(placed):
            if before.offset + before.length > after.offset:
                raise internal("items of media lie in each other")
        return placed


def unsupported(part: MediaPart) -> InvalidArgument:
    """The error for an image or a video that the model does not take."""
    return InvalidArgument(f"{part.where}: this model takes no {part.modality}s", field=part.where)


def refuse_all(messages: Sequence[Message]) -> None:
    """Raises for media in a conversation with a model that takes none."""
    for message in messages:
        for part in media_of(message.content):
            raise unsupported(part)


def cut(items: Sequence[MediaItem], total: int, limit: int | None, side: str | None, field: str) -> list[MediaItem]:
    """The items of a prompt that is cut from `total` to `limit` ids. Raises where the cut goes through one."""
    if limit is None or total <= limit:
        return list(items)
    start, end = (0, limit) if side == "right" else (total - limit, total)
    kept = []
    for item in items:
        last = item.offset + item.length
        if start <= item.offset and last <= end:
            kept.append(replace(item, offset=item.offset - start))
        elif item.offset < end and last > start:
            raise InvalidArgument(
                f"{field}: {limit} tokens end cut through the {item.modality} at token {item.offset}", field=field
            )
    return kept
