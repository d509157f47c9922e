"""Writes goldens.json from the processors of transformers: python -m tests.gateway.media.goldens.make

They need torchvision, which cannot be imported beside this project's torch. Made with transformers 5.23.0,
torch 2.14.1, torchvision 0.29.1, in an environment of their own:

    pip install torch==2.14.1 torchvision==0.29.1 transformers==5.23.0 pillow==13.0.0
"""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.qwen2_vl import video_processing_qwen2_vl as qwen2
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as image_resize
from transformers.models.qwen3_vl import video_processing_qwen3_vl as qwen3
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from tests.gateway.media.goldens.clips import CLIPS, SIZE, clip_of, sampled_bytes

SIDES = ((1, 1), (10, 100), (17, 31), (48, 64), (100, 100), (333, 517), (720, 1280), (1080, 1920), (2160, 200))
BOUNDS = ((1024, 65536), (65536, 16777216), (4096, 25165824), (131072, 786432))
SAMPLED = tuple(
    (total, fps, asked)
    for total, fps, asked in product(
        (1, 2, 3, 7, 50, 200, 299, 3000), (0.4, 10.0, 30000 / 1001, 30.0), ({}, {"num_frames": 8}, {"fps": 0.5})
    )
    if total >= asked.get("num_frames", 0)
)


def sampled(indices: Any) -> list[Any]:
    """Indices, or of many their number and their hash."""
    found = [int(index) for index in indices]
    return found if len(found) <= 16 else [len(found), hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]]


def main() -> None:
    images = [
        [height, width, side, *bounds, *image_resize(height, width, side, *bounds)]
        for (height, width), bounds, side in product(SIDES, BOUNDS, (28, 32))
        if max(height, width) <= 200 * min(height, width)
    ]
    videos = [
        [frames, height, width, *bounds, *qwen3.smart_resize(frames, height, width, 2, 32, *bounds)]
        for frames, (height, width), bounds in product((2, 3, 5, 16, 768), SIDES, BOUNDS)
    ]
    plain, strided = (
        SimpleNamespace(fps=2, min_frames=4, max_frames=768),
        SimpleNamespace(fps=None, num_frames=None, temporal_patch_size=2, min_frames=4, max_frames=768),
    )
    even = []
    steps = []
    for total, fps, asked in SAMPLED:
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        even.append([total, fps, asked, sampled(qwen3.Qwen3VLVideoProcessor.sample_frames(plain, metadata, **asked))])
        if total >= 2:
            also = asked or {"fps": 2}
            steps.append(
                [total, fps, also, sampled(qwen2.Qwen2VLVideoProcessor.sample_frames(strided, metadata, **also))]
            )
    processor = qwen3.Qwen3VLVideoProcessor(size=SIZE)
    clips = []
    for case in CLIPS:
        metadata = VideoMetadata(total_num_frames=case["frames"], fps=float(case["fps"]))
        made = processor(
            torch.from_numpy(clip_of(case)), video_metadata=[metadata], return_metadata=True, return_tensors="pt",
            input_data_format="channels_last", **case["asked"],
        )  # fmt: skip
        data = ((made["pixel_values_videos"] * 0.5 + 0.5) * 255).round().to(torch.uint8).numpy().reshape(-1)
        names = SimpleNamespace(
            video_processor=processor, video_token="P", vision_start_token="[", vision_end_token="]",
            _calculate_timestamps=lambda *args: Qwen3VLProcessor._calculate_timestamps(None, *args),
        )  # fmt: skip
        clips.append(
            {
                "grid": made["video_grid_thw"][0].tolist(),
                "indices": [int(index) for index in made["video_metadata"][0].frames_indices],
                "text": Qwen3VLProcessor.replace_video_token(names, made, 0),
                "bytes": int(data.size),
                "sample": sampled_bytes(data).tolist(),
            }
        )
    tables = {"images": images, "videos": videos, "even": even, "strided": steps, "clips": clips}
    blocks = []
    for name, rows in tables.items():
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        blocks.append(f'"{name}": [\n{lines}\n]')
    Path(__file__).with_name("goldens.json").write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    main()
