"""The videos of the golden values, and what was asked of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLIPS = (
    {"frames": 8, "size": (48, 64), "fps": Fraction(4), "asked": {}},
    {"frames": 30, "size": (180, 320), "fps": Fraction(10), "asked": {}},
    {"frames": 25, "size": (332, 516), "fps": Fraction(30_000, 1001), "asked": {"num_frames": 5, "fps": None}},
    {"frames": 2, "size": (66, 84), "fps": Fraction(2), "asked": {}, "sharp": True},
    {"frames": 6, "size": (90, 40), "fps": Fraction(3), "asked": {"fps": 1}},
)
SIZE = {"shortest_edge": 4096, "longest_edge": 131072}


def sampled_bytes(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Those that are kept of a clip's patches: at most 800, at steps that meet all places in a patch."""
    return data.reshape(-1)[:: max(61, data.size // 500)]


def frame(index: int, height: int, width: int) -> NDArray[np.uint8]:
    """A picture with edges, slopes and fine texture that is the same everywhere: whole numbers only."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    texture = (x * 7919 + y * 104729 + c * 1299709 + index * 15485863) % 97
    blocks = ((x // 9 + y // 7 + index) % 3) * 70
    return ((blocks + texture * (y % 32 < 12) + x * (c + 1) // 5 + index * 5) % 256).astype(np.uint8)


def clip_of(case: dict[str, Any]) -> NDArray[np.uint8]:
    """Its frames, [T, H, W, C]."""
    frames = np.stack([frame(index, *case["size"]) for index in range(case["frames"])])
    return np.where(frames % 2, 255, 0).astype(np.uint8) if case.get("sharp") else frames
