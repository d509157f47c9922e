"""The rules of a model: read from its files, its placeholders and what takes their place, what may be asked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import FailedPrecondition, InvalidArgument
from services.gateway.media.items import MediaOptions, Processed
from services.gateway.processors.read import read_rules
from services.gateway.processors.rules import MediaRules

QWEN3: dict[str, Any] = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
IMAGES = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEOS = {**IMAGES, "size": {"longest_edge": 25_165_824, "shortest_edge": 4096}}


def _rules(config: dict[str, Any], **files: Any) -> MediaRules | None:
    return read_rules(
        {f"{name}.json": json.dumps(content).encode() for name, content in {"config": config, **files}.items()}
    )


def _qwen3(**changes: Any) -> MediaRules:
    rules = _rules(QWEN3, preprocessor_config=IMAGES, video_preprocessor_config=VIDEOS, **changes)
    assert rules is not None
    return rules


def test_qwen3_vl() -> None:
    """As its checkpoints ship: preprocessor_config.json and video_preprocessor_config.json."""
    rules = _qwen3()
    image, video = rules.pixels["image"], rules.pixels["video"]
    assert rules.modalities == {"image", "video"}
    assert (image.min_pixels, image.max_pixels, image.side, image.patch_bytes) == (65_536, 16_777_216, 32, 1536)
    assert (video.min_pixels, video.max_pixels, video.counts_frames) == (4096, 25_165_824, True)
    assert (video.fps, video.min_frames, video.max_frames, video.sampling) == (2, 4, 768, "even")
    assert video.max_video_tokens is None
    assert (image.image_mean, image.image_std, image.resample) == ((0.5,) * 3, (0.5,) * 3, "bicubic")


def test_qwen25_vl() -> None:
    """One file for both, with the old names of the bounds; CLIP's means by default."""
    old = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    rules = _rules({"model_type": "qwen2_5_vl"}, preprocessor_config=old)
    assert rules is not None
    video = rules.pixels["video"]
    assert (rules.layout, video.sampling, video.counts_frames, video.side) == ("run", "strided", False, 28)
    assert (video.min_pixels, video.max_pixels) == (3136, 12_845_056)
    assert video.image_mean == (0.48145466, 0.4578275, 0.40821073)
    assert rules.expand(Processed(bytes(32), "video", (2, 4, 4), 8, (0.0, 1.0))) == "<|video_pad|>" * 8


def test_one_file_for_both_processors() -> None:
    """processor_config.json, as transformers 5 writes it."""
    both = {"image_processor": {**IMAGES, "resample": 2}, "video_processor": {**VIDEOS, "fps": 1, "num_frames": 8}}
    rules = _rules(QWEN3, processor_config=both, preprocessor_config={**IMAGES, "patch_size": 8})
    assert rules is not None
    assert rules.pixels["image"].resample == "bilinear"
    assert (rules.pixels["video"].fps, rules.pixels["video"].num_frames) == (1, 8)


def test_what_is_not_there_is_not_taken() -> None:
    assert _rules({"model_type": "llama"}, preprocessor_config=IMAGES) is None
    assert _rules(QWEN3) is None
    images = _rules(QWEN3, processor_config={"image_processor": IMAGES})
    assert images is not None
    assert images.modalities == {"image"}


def test_numbers_are_brought_to_bytes() -> None:
    """Whatever a processor multiplies bytes by, mean and deviation are said of bytes that were divided by 255."""
    rules = _rules(QWEN3, preprocessor_config={**IMAGES, "do_rescale": False, "image_mean": [51, 51, 51]})
    assert rules is not None
    assert rules.pixels["image"].image_mean == pytest.approx((0.2,) * 3)
    plain = _rules(QWEN3, preprocessor_config={**IMAGES, "do_normalize": False})
    assert plain is not None
    assert (plain.pixels["image"].image_mean, plain.pixels["image"].image_std) == ((0.0,) * 3, (1.0,) * 3)


def test_a_cap_of_pixels_per_frame() -> None:
    """Off unless the file says so, as transformers 5.23 has it."""
    rules = _rules(QWEN3, video_preprocessor_config={**VIDEOS, "cap_pixels_per_frame": True})
    assert rules is not None
    assert rules.pixels["video"].max_video_tokens == 768


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"patch_size": 0}, "patch_size must be a whole number"),
        ({"patch_size": "16"}, "patch_size must be a whole number"),
        ({"patch_size": 14}, "patch_size must be 16, as vision_config"),
        ({"merge_size": 4}, "merge_size must be 2, as vision_config"),
        ({"size": 224}, "size must be an object"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "size.shortest_edge must be at most"),
        ({"size": {"shortest_edge": -1, "longest_edge": 8}}, "size.shortest_edge must be a whole number"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std must be three numbers"),
        ({"resample": 9}, "resample must be a number from 0 to 5"),
        ({"rescale_factor": 0}, "rescale_factor must be a number above 0"),
        ({"do_resize": False}, "do_resize must be true"),
    ],
)
def test_files_that_are_wrong_are_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(FailedPrecondition, match=told) as error:
        _rules(QWEN3, preprocessor_config={**IMAGES, **change})
    assert error.value.field == "preprocessor_config.json"
    with pytest.raises(FailedPrecondition, match="fps must be"):
        _rules(QWEN3, video_preprocessor_config={**VIDEOS, "fps": -1})


def test_text_in_place_of_a_placeholder() -> None:
    rules = _qwen3()
    image = Processed(bytes(32), "image", (1, 4, 6), 6)
    assert rules.placeholder("image") == "<|image_pad|>"
    assert rules.expand(image) == "<|image_pad|>" * 6
    video = Processed(bytes(32), "video", (2, 2, 4), 4, (0.25, 11.75))
    pads = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    assert rules.expand(video) == f"<0.2 seconds>{pads}<11.8 seconds>{pads}"


def test_tokens_may_have_other_names() -> None:
    names = {"image_token": "<img>", "extra_special_tokens": {"video_token": "<vid>", "vision_start_token": "<v>"}}
    rules = _qwen3(tokenizer_config=names)
    assert (rules.placeholder("image"), rules.placeholder("video")) == ("<img>", "<vid>")
    assert rules.expand(Processed(bytes(32), "video", (1, 2, 2), 1, (0.0,))) == "<0.0 seconds><v><vid><|vision_end|>"
    assert rules.embedding_ids({"<img>": 7, "<vid>": 8}.get) == {"image": 7, "video": 8}
    with pytest.raises(FailedPrecondition, match="<vid>"):
        rules.embedding_ids({"<img>": 7}.get)


@pytest.mark.parametrize(
    ("modality", "options", "told"),
    [
        ("image", {"fps": 2.0}, "fps is of videos"),
        ("video", {"fps": 2.0, "num_frames": 4}, "exclude each other"),
        ("video", {"fps": 0.0}, "fps must be above 0"),
        ("video", {"fps": 1e9}, "at most 1000"),
        ("video", {"min_frames": 9, "max_frames": 8}, "min_frames is 9, above max_frames, 8"),
        ("video", {"max_frames": 3}, "min_frames is 4, above max_frames, 3"),
        ("image", {"max_pixels": 65_535}, "min_pixels is 65536, above max_pixels, 65535"),
        ("image", {"min_pixels": 1 << 25}, "above max_pixels"),
        ("image", {"max_pixels": 1 << 40}, "max_pixels must be above 0 and at most"),
    ],
)
def test_what_cannot_be_honoured_is_refused(modality: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as error:
        _qwen3().check_options(MediaOptions(**options), modality, "messages[0].content[1]")
    assert error.value.field == "messages[0].content[1]"


def test_what_can_be_honoured() -> None:
    rules = _qwen3()
    rules.check_options(MediaOptions(), "image", "x")
    rules.check_options(MediaOptions(min_pixels=1024, max_pixels=4096), "image", "x")
    rules.check_options(MediaOptions(fps=0.5, min_frames=2, max_frames=16), "video", "x")
    few = replace(rules, pixels={"video": replace(rules.pixels["video"], max_frames=2, min_frames=1)})
    few.check_options(MediaOptions(num_frames=64), "video", "x")
