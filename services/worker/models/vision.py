"""The encoder of images and videos: patches to vectors that a decoder reads in the places of tokens.

A frame (an image, or two frames of a video as one) attends to itself alone, so that frames are rows of a batch:

    patches of a frame ──▶ + learned position ──▶ blocks ──────────────────────▶ merger ──▶ part 0 of its embeddings
                                                    └─ after some of them ─▶ a merger each ▶ parts 1, 2, …

N patches   B values of a patch   C size of hidden states   H heads   A head size   E = A / 2 rotated pairs
F frames of one size   L patches of a frame   M embeddings   U patches of one   P parts   D the decoder's hidden size
S learned positions of a side
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.media.encoder import EAGER, Compile, EncoderOps, Patches, Sizes
from services.worker.layers import Merger, VisionBlock, VisionWeights
from services.worker.models.config import VisionConfig

_EPS = 1e-6
MOST_PATCHES = 8192
"""Patches of one pass, unless a single frame has more: what the encoder takes at once is bounded by it."""


class Item(NamedTuple):
    """An image or a video, as bytes of its pixels."""

    grid: tuple[int, ...]  # patches in time, height and width
    bytes_NB: torch.Tensor  # uint8, channels outermost in a patch; patches of an embedding lie together
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]


class _Frame(NamedTuple):
    item: int
    number: int
    height: int  # in patches
    width: int

    @property
    def patches(self) -> int:
        return self.height * self.width


class VisionEncoder:
    """Items to embeddings."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, compile: Compile | None = None) -> None:
        """`compile`: makes a pass of the mathematics; without it they run as they stand."""
        self.config = config
        self.weight_bytes = weights.nbytes
        self.dtype = weights.dtype
        self._weights = weights
        quarter = config.hidden_size // config.num_heads // 4
        self._inv_freq = config.rope_theta ** -(torch.arange(quarter).float() / quarter)  # of each axis
        mathematics = _Mathematics(config, weights)
        self._run: Callable[[Patches[torch.Tensor]], torch.Tensor] = partial(mathematics, EAGER)
        if compile is not None:
            self._run = compile(mathematics, Sizes(config.hidden_size, 2 * quarter, MOST_PATCHES, self.dtype))

    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """The embeddings [M, P, D] of each item, in its order."""
        frames = [
            _Frame(index, number, *item.grid[1:]) for index, item in enumerate(items) for number in range(item.grid[0])
        ]
        made: list[list[torch.Tensor]] = [[] for _ in items]
        for together in _passes(frames):
            rows_MPD = self._forward(self._patches(items, together), together)
            counts = [frame.patches // self.config.merged for frame in together]
            for frame, rows in zip(together, torch.split(rows_MPD, counts), strict=True):
                made[frame.item].append(rows)
        return [torch.cat(rows) for rows in made]

    def pass_bytes(self, largest_frame: int) -> int:
        """What one pass takes at most beside weights and results, where the largest frame has so many patches."""
        config = self.config
        patches = max(largest_frame, MOST_PATCHES)
        sliced = min(patches, MOST_PATCHES) * (2 * config.patch_bytes + 2 * config.intermediate_size)
        return (patches * 12 * config.hidden_size + sliced) * self.dtype.itemsize

    def _patches(self, items: Sequence[Item], frames: Sequence[_Frame]) -> torch.Tensor:
        """The products [N, C] of the frames' pixels, so many patches at once."""
        pixels: list[torch.Tensor] = []
        for frame in frames:
            first = frame.number * frame.patches
            for begin in range(first, first + frame.patches, MOST_PATCHES):
                pixels.append(self._pixels(items[frame.item], begin, min(begin + MOST_PATCHES, first + frame.patches)))
                if len(frames) == 1:
                    pixels[-1] = self._weights.patch(pixels[-1])
        return torch.cat(pixels) if len(frames) == 1 else self._weights.patch(torch.cat(pixels))

    def _pixels(self, item: Item, first: int, last: int) -> torch.Tensor:
        """(byte / 255 - mean) / std of some patches, [N, B]."""
        bytes_NB = item.bytes_NB[first:last].to(self._weights.device)
        x_NKV = torch.unflatten(bytes_NB, 1, (self.config.channels, -1)).float().div_(255)
        mean_K1, std_K1 = (torch.tensor(value, device=x_NKV.device)[:, None] for value in (item.mean, item.std))
        return x_NKV.sub_(mean_K1).div_(std_K1).flatten(1).to(self.dtype)

    def _forward(self, x_NC: torch.Tensor, frames: Sequence[_Frame]) -> torch.Tensor:
        """The embeddings [M, P, D] of whole frames."""
        sizes = [(frame.height, frame.width) for frame in frames]
        tables = {size: self._tables(*size) for size in set(sizes)}
        positions_NC, cos_NE, sin_NE = (
            torch.cat([tables[size][which] for size in sizes]).to(self.dtype) for which in range(3)
        )
        attend = partial(_attend, [frame.patches for frame in frames])
        return self._run(Patches(x_NC, positions_NC, cos_NE, sin_NE, attend))

    def _tables(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the patches of a frame, in their order: learned positions [L, C], cos and sin of their angles [L, E]."""
        merge, device = self.config.merge, self._weights.device
        shape = (height // merge, width // merge, merge, merge)
        rows_L = torch.arange(height).view(shape[0], 1, merge, 1).expand(shape).flatten()
        columns_L = torch.arange(width).view(1, shape[1], 1, merge).expand(shape).flatten()
        angle_LE = torch.cat([at_L[:, None] * self._inv_freq for at_L in (rows_L, columns_L)], dim=1)
        positions_LC = _interpolate(self._weights.positions_SSC, (rows_L, height), (columns_L, width))
        return positions_LC, angle_LE.cos().to(device), angle_LE.sin().to(device)


def _interpolate(
    table_SSC: torch.Tensor, rows: tuple[torch.Tensor, int], columns: tuple[torch.Tensor, int]
) -> torch.Tensor:
    """Bilinear, with the corners of the table at the corners of the grid: places (at, of how many) to [L, C]."""
    side, device = len(table_SSC), table_SSC.device
    corners = [
        table_SSC[row_L.to(device), column_L.to(device)] * (row_weight_L * column_weight_L)[:, None].to(device)
        for row_L, row_weight_L in _neighbours(*rows, side)
        for column_L, column_weight_L in _neighbours(*columns, side)
    ]
    return torch.stack(corners).sum(0)


def _neighbours(at_L: torch.Tensor, count: int, side: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The two places of the table around each of `count`, and what each counts for."""
    source_L = at_L.float() * (side - 1) / max(count - 1, 1)
    low_L = source_L.floor()
    yield low_L.long(), 1 - (source_L - low_L)
    yield (low_L.long() + 1).clamp(max=side - 1), source_L - low_L


def _passes(frames: Sequence[_Frame]) -> Iterator[list[_Frame]]:
    """Frames whose patches go through the encoder together."""
    together: list[_Frame] = []
    patches = 0
    for frame in frames:
        if together and patches + frame.patches > MOST_PATCHES:
            yield together
            together, patches = [], 0
        together.append(frame)
        patches += frame.patches
    if together:
        yield together


class _Mathematics:
    """The pass itself: symbols or tensors in, symbols or tensors out."""

    def __init__(self, config: VisionConfig, weights: VisionWeights) -> None:
        self._config = config
        self._weights = weights

    def __call__(self, ops: EncoderOps[Any], patches: Patches[Any]) -> Any:
        """The embeddings [M, P, D] of whole frames."""
        weights, deepstack, merged = self._weights, self._config.deepstack, self._config.merged
        x_NC = ops.add(patches.x_NC, patches.positions_NC)
        between: dict[int, Any] = {}
        for index, block in enumerate(weights.blocks):
            x_NC = ops.add(x_NC, self._attention(ops, patches, x_NC, block))
            x_NC = ops.by_parts(partial(self._mlp, ops, block), x_NC, MOST_PATCHES)
            if index in deepstack:
                between[index] = x_NC
        whole_NC = ops.layer_norm(x_NC, *weights.merger.norm, _EPS)
        parts: list[Any] = []
        for index, joined_from in between.items():  # in the order of the blocks, however the config lists them
            merger = weights.deepstack[deepstack.index(index)]
            joined = ops.join(joined_from, merged)
            parts.append(_merge(ops, ops.layer_norm(joined, *merger.norm, _EPS), merger))
        return ops.stack([_merge(ops, ops.join(whole_NC, merged), weights.merger), *parts])

    def _attention(self, ops: EncoderOps[Any], patches: Patches[Any], x_NC: Any, block: VisionBlock) -> Any:
        heads = self._config.num_heads
        size = self._config.hidden_size // heads
        normed_NC = ops.layer_norm(x_NC, *block.attention_norm, _EPS)
        qk_NXA, v_NHA = ops.split_heads(block.qkv(normed_NC), (2 * heads, heads), size)
        return block.output(patches.attend(ops.rope(qk_NXA, patches.cos_NE, patches.sin_NE), v_NHA))

    def _mlp(self, ops: EncoderOps[Any], block: VisionBlock, x_NC: Any) -> Any:
        approximate = "none" if self._config.exact_gelu else "tanh"
        up_NF = block.up(ops.layer_norm(x_NC, *block.mlp_norm, _EPS))
        return ops.add(x_NC, block.down(ops.gelu(up_NF, approximate)))


def _attend(patches: Sequence[int], qk_NXA: torch.Tensor, v_NHA: torch.Tensor) -> torch.Tensor:
    """Every patch attends to those of its frame; frames of one size beside each other go together."""
    q_NHA, k_NHA = qk_NXA.chunk(2, dim=1)
    outputs: list[torch.Tensor] = []
    first = 0
    for size, run in groupby(patches):
        last = first + size * sum(1 for _ in run)
        q_FHLA, k_FHLA, v_FHLA = (
            torch.unflatten(x_NHA[first:last], 0, (-1, size)).transpose(1, 2) for x_NHA in (q_NHA, k_NHA, v_NHA)
        )
        attended_FHLA = F.scaled_dot_product_attention(q_FHLA, k_FHLA, v_FHLA)
        outputs.append(attended_FHLA.transpose(1, 2).reshape(last - first, -1))
        first = last
    return torch.cat(outputs)


def _merge(ops: EncoderOps[Any], x_MX: Any, merger: Merger) -> Any:
    """Joined patches [M, U * C] to [M, D]."""
    return merger.down(ops.gelu(merger.up(x_MX), "none"))
