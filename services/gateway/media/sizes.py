"""How large an item becomes, and which frames of a video are taken: arithmetic alone.

Sizes and choices are those of the processors of transformers 5.23 (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), wherever those
have an answer. Where they refuse (a shape longer than 200 to 1, a video of one frame), the same rule goes on,
clamped: no side is ever less than one patch, and no item more than its bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from services.gateway.media.items import MediaOptions, PixelSettings

_LONG = 200
"""The ratio of sides beyond which the processors of transformers refuse."""
_DEFAULT_FPS = 2.0


def image_size(height: int, width: int, pixels: PixelSettings, options: MediaOptions) -> tuple[int, int]:
    """Height and width that an image of this size is resized to: multiples of `pixels.side`."""
    least, most = _bounds(pixels, options)
    return _smart(height, width, pixels.side, least, most)


def video_size(frames: int, height: int, width: int, pixels: PixelSettings, options: MediaOptions) -> tuple[int, int]:
    """Height and width that each of so many frames is resized to."""
    least, most = _bounds(pixels, options)
    side = pixels.side
    frames = max(frames, pixels.temporal_patch_size)
    if not pixels.counts_frames:
        if pixels.max_video_tokens is not None:
            shared = int(pixels.max_video_tokens * side * side * 0.9) * pixels.temporal_patch_size // frames
            most = max(min(most, shared), int(least * 1.05))
        return _smart(height, width, side, least, most)
    if pixels.max_video_tokens is not None:
        each = max(min(pixels.max_video_tokens * side * side, most // frames), int(least * 1.05))
        most = each * frames
    if height < side or width < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    counted = round(frames / pixels.temporal_patch_size) * pixels.temporal_patch_size
    return _smart(height, width, side, least, most, frames=frames, counted=counted)


def _bounds(pixels: PixelSettings, options: MediaOptions) -> tuple[int, int]:
    return options.min_pixels or pixels.min_pixels, options.max_pixels or pixels.max_pixels


def _smart(
    height: int, width: int, side: int, least: int, most: int, *, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Both sides to the nearest multiple, then scaled where frames together are above `most` or below `least`.

    `counted` are the frames as whole patches in time: with them it is decided, with `frames` it is scaled.
    """
    high, wide = round(height / side) * side, round(width / side) * side
    if counted * high * wide > most:
        shrink = math.sqrt((frames * height * width) / most)
        high = max(side, math.floor(height / shrink / side) * side)
        wide = max(side, math.floor(width / shrink / side) * side)
    elif counted * high * wide < least:
        grow = math.sqrt(least / (frames * height * width))
        high = math.ceil(height * grow / side) * side
        wide = math.ceil(width * grow / side) * side
    if max(height, width) <= _LONG * min(height, width):
        return high, wide
    longest = max(side, most // (counted * max(side, min(high, wide))) // side * side)
    return max(side, min(high, longest)), max(side, min(wide, longest))


def frames_wanted(total: int, seconds: Fraction | None, pixels: PixelSettings, options: MediaOptions) -> int:
    """How many frames to take of `total`, which last so long; None where the file does not say.

    A video that does not say is taken whole, up to the most frames.
    """
    fewest = options.min_frames or pixels.min_frames
    most = options.max_frames or pixels.max_frames
    number = options.num_frames
    if number is None and options.fps is None:
        number = pixels.num_frames
    step = pixels.temporal_patch_size if pixels.sampling == "strided" else 1
    if number is not None:
        return max(1, min(round(number / step) * step, total))
    per_second = Fraction(options.fps or pixels.fps or _DEFAULT_FPS)
    wanted = Fraction(total) if seconds is None else seconds * per_second
    within = min(max(math.floor(wanted), fewest), most, total)
    return max(1, within // step * step)


def choose_frames(times: Sequence[Fraction], pixels: PixelSettings, options: MediaOptions) -> list[int]:
    """Indices of the frames to take, rising; `times` are those of all frames, in seconds and in order.

    Frames at a constant rate are chosen by index, as the processors do it; others by time, so that a second that
    holds many frames counts no more than one that holds few.
    """
    total = len(times)
    mean_step = (times[-1] - times[0]) / (total - 1) if total > 1 else Fraction(0)
    count = frames_wanted(total, mean_step * total if mean_step > 0 else None, pixels, options)
    if pixels.sampling == "strided":
        places = [Fraction(index * total, count) for index in range(count)]
        if _is_constant(times, mean_step):
            return [math.floor(place) for place in places]
    else:
        stride = (total - 1) / (count - 1) if count > 1 else 0.0
        rounded = [round(index * stride) for index in range(count - 1)] + [total - 1 if count > 1 else 0]
        if _is_constant(times, mean_step):
            return rounded
        places = [Fraction((total - 1) * index, max(1, count - 1)) for index in range(count)]
    return _nearest(times, [times[0] + place * mean_step for place in places])


def _is_constant(times: Sequence[Fraction], step: Fraction) -> bool:
    """Whether each frame stands less than half a step from its place at a constant rate."""
    if step <= 0:
        return True
    start = times[0]
    return all(2 * abs(at - start - index * step) < step for index, at in enumerate(times))


def _nearest(times: Sequence[Fraction], targets: Sequence[Fraction]) -> list[int]:
    """For each target, which rise, the frame that is nearest in time; none twice."""
    chosen: list[int] = []
    index = 0
    for target in targets:
        while index + 1 < len(times) and abs(times[index + 1] - target) <= abs(times[index] - target):
            index += 1
        if not chosen or chosen[-1] != index:
            chosen.append(index)
    return chosen


def patch_times(times: Sequence[float], temporal: int) -> tuple[float, ...]:
    """For each patch in time, the middle between its first and last frame; the last frame fills up the last patch."""
    if not times:
        return ()
    filled = [*times, *[times[-1]] * (-len(times) % temporal)]
    return tuple((filled[i] + filled[i + temporal - 1]) / 2 for i in range(0, len(filled), temporal))
