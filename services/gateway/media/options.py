"""What a request asks of its media: `media_io_kwargs` and `mm_processor_kwargs`, vLLM's names, as MediaOptions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from services.common.errors import InvalidArgument
from services.common.settings import nearest
from services.gateway.kinds import whole, wrong
from services.gateway.media.items import MediaOptions

READING: Final[Mapping[str, tuple[str, ...]]] = {"image": (), "video": ("fps", "num_frames")}
"""Keys of media_io_kwargs, by modality."""
PROCESSING: Final = ("min_pixels", "max_pixels", "fps", "num_frames", "min_frames", "max_frames")
"""Keys of mm_processor_kwargs."""
MOST: Final[Mapping[str, int]] = {
    "fps": 1000,
    "num_frames": 1_000_000,
    "min_frames": 1_000_000,
    "max_frames": 1_000_000,
    "min_pixels": 1 << 26,
    "max_pixels": 1 << 26,
}
"""Far above what any model is made for; what the server takes is less, and is checked when the item is known."""
_OF_IMAGES: Final = ("min_pixels", "max_pixels")


def read_options(reading: object, processing: object, *, fields: tuple[str, str]) -> Mapping[str, MediaOptions]:
    """Options by modality. `fields` is how the caller spells the two; each value is checked by itself."""
    io_field, mm_field = fields
    video = _numbers(processing, PROCESSING, mm_field)
    for modality, entry in _object(reading, READING, io_field).items():
        place = f"{io_field}.{modality}"
        for name, value in _numbers(entry, READING[modality], place).items():
            if video.setdefault(name, value) != value:
                raise InvalidArgument(f"{place}.{name}: contradicts {mm_field}.{name}", field=f"{place}.{name}")
    image = {name: value for name, value in video.items() if name in _OF_IMAGES}
    return {"image": MediaOptions(**image), "video": MediaOptions(**video)}


def _object(value: object, keys: Collection[str], field: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(field, f"an object with {', '.join(keys) or 'no keys'}", value)
    for key in value:
        if key not in keys:
            raise InvalidArgument(f"{field}.{key}: unknown field{nearest(str(key), keys)}", field=f"{field}.{key}")
    return {key: entry for key, entry in value.items() if entry is not None}


def _numbers(value: object, keys: Collection[str], field: str) -> dict[str, Any]:
    return {name: _number(name, entry, f"{field}.{name}") for name, entry in _object(value, keys, field).items()}


def _number(name: str, value: object, field: str) -> float | int:
    most = MOST[name]
    if name != "fps":
        number = whole(value)
        if number is None or not 0 < number <= most:
            raise wrong(field, f"an integer from 1 to {most}", value)
        return number
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise wrong(field, f"a number above 0, at most {most}", value)
    return float(value)
