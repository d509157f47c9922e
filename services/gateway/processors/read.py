"""The rules of a model, read from its files. Unset keys have the defaults of transformers' processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from services.common.errors import FailedPrecondition
from services.gateway.media.items import PixelSettings, Resample
from services.gateway.processors.rules import MediaRules
from services.gateway.text_files import read_json


@dataclass(slots=True, frozen=True)
class _Family:
    """Processors of one kind: how a video stands in the prompt, and the defaults of both modalities."""

    layout: Literal["timed", "run"]
    image: Mapping[str, Any]
    video: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # of videos: what no file says


_CLIP: Mapping[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_IMAGE: Mapping[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    **_CLIP,
}
_QWEN2 = _Family(
    "run",
    _IMAGE,
    {**_IMAGE, "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "max_video_tokens": 128_000},
    {"sampling": "strided"},
)
_QWEN3 = _Family(
    "timed",
    _IMAGE,
    {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "fps": 2,
        "max_video_tokens": 768,
    },
    {"sampling": "even", "counts_frames": True},
)
_FAMILIES: Mapping[str, _Family] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
_IMAGES_FILE, _VIDEOS_FILE, _BOTH_FILE = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_RESAMPLES: tuple[Resample, ...] = get_args(Resample)  # in the order of Pillow's numbers


def read_rules(files: Mapping[str, bytes]) -> MediaRules | None:
    """From config.json, preprocessor_config.json, video_preprocessor_config.json or processor_config.json.

    None where the model takes no media, or none that is known here; a modality without a processor's file is not
    taken. Raises FailedPrecondition naming file and key.
    """
    config = read_json(files, "config.json")
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    pixels = {}
    for modality, defaults in (("image", family.image), ("video", family.video)):
        found = _processor(files, modality)
        if found is not None:
            pixels[modality] = _Reader(*found, defaults).pixels(modality, family, config)
    if not pixels:
        return None
    return MediaRules(
        pixels,
        {modality: _token(files, f"{modality}_token", f"<|{modality}_pad|>") for modality in pixels},
        _token(files, "vision_start_token", "<|vision_start|>"),
        _token(files, "vision_end_token", "<|vision_end|>"),
        family.layout,
    )


def _processor(files: Mapping[str, bytes], modality: str) -> tuple[str, Mapping[str, Any]] | None:
    """The file that says how items of that modality are processed, and what it says; a newer name goes first."""
    within = read_json(files, _BOTH_FILE).get(f"{modality}_processor")
    if isinstance(within, dict):
        return _BOTH_FILE, within
    for name in (_VIDEOS_FILE, _IMAGES_FILE) if modality == "video" else (_IMAGES_FILE,):
        if name in files:
            return name, read_json(files, name)
    return None


def _token(files: Mapping[str, bytes], key: str, usual: str) -> str:
    """A special token by its role; tokenizer_config.json may name another than the usual one."""
    config = read_json(files, "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    for place in (config, extra if isinstance(extra, dict) else {}):
        value = place.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            return value
    return usual


@dataclass(slots=True, frozen=True)
class _Reader:
    """One processor's values. What it says is checked; what it leaves out has a default."""

    file: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def pixels(self, modality: str, family: _Family, config: Mapping[str, Any]) -> PixelSettings:
        """All of it, for items of that modality."""
        if self.values.get("do_resize") is False:
            raise self._wrong("do_resize", "true: without it an item has no whole patches")
        least, most = self._bounds()
        mean, std = self._normal()
        patch, merge, temporal = (self._whole(key) for key in ("patch_size", "merge_size", "temporal_patch_size"))
        self._agrees(config, {"patch_size": patch, "spatial_merge_size": merge, "temporal_patch_size": temporal})
        image = PixelSettings(modality, patch, merge, temporal, least, most, mean, std, self._resample())
        if modality == "image":
            return image
        fps, number = self._number("fps"), self._number("num_frames")
        return replace(
            image,
            **family.fixed,
            fps=fps,
            num_frames=None if number is None else int(number),
            min_frames=int(self._number("min_frames") or 4),
            max_frames=int(self._number("max_frames") or 768),
            max_video_tokens=self._whole("max_video_tokens") if self.values.get("cap_pixels_per_frame") else None,
        )

    def _wrong(self, key: str, wanted: str) -> FailedPrecondition:
        return FailedPrecondition(f"{self.file}: {key} must be {wanted}", field=self.file)

    def _value(self, key: str) -> Any:
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def _whole(self, key: str) -> int:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self._wrong(key, "a whole number above 0")
        return value

    def _number(self, key: str) -> float | None:
        """None where neither file nor defaults say."""
        value = self._value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 31:
            raise self._wrong(key, "a number above 0")
        return float(value)

    def _bounds(self) -> tuple[int, int]:
        """Fewest and most pixels. Old files say min_pixels and max_pixels, new ones name edges, and mean the same."""
        size = self._value("size")
        if not isinstance(size, dict):
            raise self._wrong("size", "an object with shortest_edge and longest_edge")
        bounds = []
        for old, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            value = self.values.get(old) or size.get(edge) or size.get(old) or self.defaults["size"][edge]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
                raise self._wrong(f"size.{edge}", "a whole number above 0")
            bounds.append(value)
        if bounds[0] > bounds[1]:
            raise self._wrong("size.shortest_edge", "at most size.longest_edge")
        return bounds[0], bounds[1]

    def _normal(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of bytes that were divided by 255, whatever the file wants them multiplied by."""
        scale = 255 * self._scale()
        if self.values.get("do_normalize") is False:
            return (0.0,) * 3, (1 / scale,) * 3
        mean, std = (self._channels(key) for key in ("image_mean", "image_std"))
        if not all(std):
            raise self._wrong("image_std", "three numbers, none 0")
        return tuple(value / scale for value in mean), tuple(value / scale for value in std)

    def _scale(self) -> float:
        if self.values.get("do_rescale") is False:
            return 1.0
        return self._number("rescale_factor") or 1 / 255

    def _channels(self, key: str) -> list[float]:
        value = self._value(key)
        if not isinstance(value, list) or len(value) != 3 or not all(type(each) in (int, float) for each in value):
            raise self._wrong(key, "three numbers")
        return [float(each) for each in value]

    def _resample(self) -> Resample:
        value = self.values.get("resample", 3)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(_RESAMPLES):
            raise self._wrong("resample", "a number from 0 to 5, as Pillow counts its filters")
        return _RESAMPLES[value]

    def _agrees(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """The encoder's own sizes are the processor's."""
        vision = config.get("vision_config")
        for key, value in sizes.items():
            if isinstance(vision, dict) and vision.get(key, value) != value:
                raise self._wrong(
                    key.removeprefix("spatial_"), f"{vision[key]}, as vision_config.{key} in config.json says"
                )
