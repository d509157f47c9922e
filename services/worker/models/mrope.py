"""Positions with three axes, as Qwen3-VL counts them, and the places of a prompt that read embeddings.

A text token stands at one more than the largest number before it, on all axes. The h x w embeddings of an image, or of
one frame of a video, stand at the next number plus their place, and what follows behind the larger side:

    prompt   t t t [image 2 x 3 ]  t  t
    time     0 1 2  3 3 3 3 3 3    6  7
    height   0 1 2  3 3 3 4 4 4    6  7
    width    0 1 2  3 4 5 3 4 5    6  7       delta = 6 - 9

Text inside a video (times, marks of a frame's begin and end) is text. Behind the last item a token stands at its place
in the prompt plus a delta, answers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.common.errors import InvalidArgument
from services.worker.models.config import VisionConfig
from services.worker.step import Int32, MediaItem

Int64 = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class Layout:
    """Where a prompt with media stands. K embeddings of an item; X tokens up to the last that reads one."""

    places_K: tuple[Int64, ...]  # per item: the tokens that read its embeddings, in their order
    positions_3X: Int64
    delta: int  # of the tokens behind: position - place

    @property
    def end(self) -> int:
        """X: the first place that is behind all media."""
        return len(self.positions_3X[0])


def lay_out(config: VisionConfig, tokens: Int32, items: Sequence[MediaItem]) -> Layout:
    """Raises InvalidArgument for an item whose grid, embeddings and placeholder tokens do not fit each other."""
    places: list[Int64] = []
    pieces: list[Int64] = []
    at = position = 0  # of the next token
    for item in items:
        frames, rows, columns = _grid(config, item)
        wanted = config.image_id if item.modality == "image" else config.video_id
        ids = tokens[item.offset : item.offset + item.length]
        places_K = item.offset + np.flatnonzero(ids == wanted)
        if len(places_K) != item.embeddings:
            raise InvalidArgument(
                f"the {item.modality} at prompt token {item.offset} has {item.embeddings} embeddings and"
                f" {len(places_K)} tokens that stand for one",
                field="media",
            )
        size = rows * columns
        for frame in range(frames):
            first, last = int(places_K[frame * size]), int(places_K[(frame + 1) * size - 1])
            if last - first != size - 1:
                raise InvalidArgument(
                    f"frame {frame} of the {item.modality} at prompt token {item.offset} has other tokens in it",
                    field="media",
                )
            pieces.append(np.tile(np.arange(position, position + first - at), (3, 1)))
            position += first - at
            grid = np.indices((1, rows, columns)).reshape(3, -1)
            pieces.append(position + grid)
            position += max(rows, columns)
            at = last + 1
        places.append(places_K)
    return Layout(tuple(places), np.concatenate(pieces, axis=1).astype(np.int64), position - at)


def _grid(config: VisionConfig, item: MediaItem) -> tuple[int, int, int]:
    """Frames, and embeddings of a frame in height and width."""
    if item.modality not in ("image", "video"):
        raise InvalidArgument(f"media of the modality {item.modality!r} are not served", field="media.modality")
    merge = config.merge
    fits = len(item.grid) == 3 and min(item.grid) > 0 and not item.grid[1] % merge and not item.grid[2] % merge
    if not fits or (item.modality == "image" and item.grid[0] != 1):
        raise InvalidArgument(
            f"the {item.modality} at prompt token {item.offset} has the grid {list(item.grid)}: time (1 for an image),"
            f" height and width, multiples of {merge}",
            field="media.grid",
        )
    frames, height, width = item.grid
    if frames * height * width != item.embeddings * config.merged:
        raise InvalidArgument(
            f"the {item.modality} at prompt token {item.offset} has {item.embeddings} embeddings for a grid of"
            f" {list(item.grid)}",
            field="media.embeddings",
        )
    return frames, height // merge, width // merge
