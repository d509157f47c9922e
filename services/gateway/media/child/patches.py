"""Pixels to patches, in the order in which the encoder takes them.

Shapes: T frames of a patch, H W C pixels of a frame, P side of a patch, M patches that are merged along a side,
h w patches of a frame. A patch is [C, T, P, P], a byte each; patches of one embedding follow each other:

    for each merged row, for each merged column: M rows of M patches      [h/M, w/M, M, M, C, T, P, P]
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from services.gateway.media.items import PixelSettings


def write_patches(file: BinaryIO, frames_THWC: NDArray[np.uint8], pixels: PixelSettings) -> None:
    """Writes one patch in time. Merged row by merged row, so that no second copy of it is made."""
    frames, height, width, channels = frames_THWC.shape
    merge, side = pixels.merge_size, pixels.patch_size
    for top in range(0, height, pixels.side):
        row = frames_THWC[:, top : top + pixels.side].reshape(
            frames, merge, side, width // pixels.side, merge, side, channels
        )
        file.write(np.ascontiguousarray(row.transpose(3, 1, 4, 6, 0, 2, 5)).data)
