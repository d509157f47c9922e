"""Parts of a turn: text, or an image or video as the client names it. Knows no model, and fetches nothing.

{"type": "image_url", "image_url": {"url": …, "detail": …}, "uuid": …}    chat
{"type": "input_image", "image_url": …, "detail": …, "uuid": …}           /v1/responses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from services.common.errors import InvalidArgument
from services.common.settings import nearest
from services.gateway.kinds import wrong
from services.gateway.limits import DEFAULT_LIMITS, check_text

Modality: TypeAlias = Literal["image", "video"]
DETAILS: Final = ("auto", "low", "high")
"""What OpenAI's `detail` may be. It says nothing to models that see every image at one scale, as those served do."""
CHAT_MEDIA: Final[Mapping[str, Modality]] = {"image_url": "image", "video_url": "video"}
"""Types of parts of a chat that are media."""
_SILENT: Final = frozenset({"system", "developer", "assistant", "function"})
"""Roles that show nothing: templates pass their media over, or have no words for them."""


@dataclass(slots=True, frozen=True)
class MediaPart:
    """An image or a video, as a client names it.

    source  a URL (https:, http:, data:, file:), or the 32 bytes of an upload's SHA-256, or "" where only uuid names it
    where   how the client calls its place: "messages[0].content[1]"
    uuid    the client's own name for it
    """

    modality: Modality
    source: str | bytes
    where: str
    uuid: str | None = None


Content: TypeAlias = "tuple[str | MediaPart, ...]"
"""Parts in order."""


def gathered(parts: Sequence[str | MediaPart]) -> tuple[str, Content]:
    """The text of a turn, joined by line breaks, and its parts in order; none where all of them are text."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts), () if len(texts) == len(parts) else tuple(parts)


def media_of(content: Content) -> list[MediaPart]:
    """The parts that are no text."""
    return [part for part in content if isinstance(part, MediaPart)]


def check_role(role: str, content: Content) -> None:
    """Raises for media in a turn of somebody who shows none."""
    if content and role in _SILENT:
        where = media_of(content)[0].where
        raise InvalidArgument(f"{where}: media belong to a turn of a user or a tool, not of {role}", field=where)


def refuse_part(kind: str, where: str) -> InvalidArgument:
    """The error for a part of a type that no model takes here."""
    return InvalidArgument(f"{where}: content of type {kind!r:.80} is not supported by this model", field=where)


def read_url_part(part: Mapping[str, Any], where: str) -> MediaPart:
    """A part of a chat that is an image or a video: its type is one of CHAT_MEDIA."""
    kind: str = part["type"]
    _check_keys(part, where, ("type", kind, "uuid"))
    place = f"{where}.{kind}"
    named = part.get(kind)
    uuid = _uuid(part, where)
    if named is None and uuid is not None:
        return MediaPart(CHAT_MEDIA[kind], "", where, uuid)
    if not isinstance(named, Mapping):
        raise wrong(place, "an object with a url", named)
    _check_keys(named, place, ("url", "detail") if kind == "image_url" else ("url",))
    _check_detail(named, place)
    return make_part(CHAT_MEDIA[kind], named.get("url"), where, uuid, place=f"{place}.url")


def read_input_image(part: Mapping[str, Any], where: str) -> MediaPart:
    """An image of /v1/responses."""
    if part.get("file_id") is not None:
        place = f"{where}.file_id"
        raise InvalidArgument(
            f"{place}: not supported by this server, which keeps no files; use image_url", field=place
        )
    _check_keys(part, where, ("type", "image_url", "detail", "file_id", "uuid"))
    _check_detail(part, where)
    return make_part("image", part.get("image_url"), where, _uuid(part, where), place=f"{where}.image_url")


def make_part(modality: Modality, url: object, where: str, uuid: str | None, *, place: str) -> MediaPart:
    """A part with a URL, which may be missing or empty where a uuid names it."""
    if url is None and uuid is not None:
        url = ""
    if not isinstance(url, str) or not (url or uuid):
        raise wrong(place, "a URL", url)
    if not url.isascii():
        check_text(url, place)
    return MediaPart(modality, url, where, uuid)


def check_uuid(uuid: str, where: str) -> str:
    """A client's own name for an item."""
    if not 0 < len(uuid) <= DEFAULT_LIMITS.media_name:
        raise wrong(f"{where}.uuid", f"a string of 1 to {DEFAULT_LIMITS.media_name} characters", uuid)
    check_text(uuid, f"{where}.uuid")
    return uuid


def _uuid(part: Mapping[str, Any], where: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is None:
        return None
    if not isinstance(uuid, str):
        raise wrong(f"{where}.uuid", "a string", uuid)
    return check_uuid(uuid, where)


def _check_detail(part: Mapping[str, Any], where: str) -> None:
    detail = part.get("detail")
    if detail is not None and detail not in DETAILS:
        raise wrong(f"{where}.detail", " or ".join(f'"{word}"' for word in DETAILS), detail)


def _check_keys(part: Mapping[str, Any], where: str, keys: Sequence[str]) -> None:
    for key in part:
        if key not in keys:
            raise InvalidArgument(f"{where}.{key}: unknown field{nearest(str(key), keys)}", field=f"{where}.{key}")
