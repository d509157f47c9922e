"""Weights of 4 bits as GPUs read them: eight numbers in a word, a scale and a minimum for each group of inputs.

    weight[o, i] = scale[i / group, o] * number + minimum[i / group, o]        number from 0 to 15

Inputs are padded to whole spans of 128. A span is 16 words; word w of a span holds, from its lowest bits on,

    bits      0      4      8      12     16       20       24       28
    input     2w     32+2w  64+2w  96+2w  2w + 1   33+2w    65+2w    97+2w

so that one shift and one mask give two neighbours of one group in the two halves of a word, as tensor cores take them.
A scale and its minimum are one word too, and those of neighbouring outputs are neighbours: a tile reads them at once.
O outputs   W words   G groups
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.linear import blocks
from kernels.linear.blocks import Blocks

Tensor = torch.Tensor

SPAN = 128
SLICE = 32
"""Inputs that one shift of a span's words gives; a group is a multiple of it that divides the span."""
GROUPS = (32, 64, 128)
_TOP = 15


@dataclass(slots=True, frozen=True)
class Packed:
    """A weight [O, I]."""

    words_OW: Tensor  # int32
    scales_GO2: Tensor  # float16: scale, minimum
    inputs: int  # I
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.words_OW.nbytes + self.scales_GO2.nbytes

    def dequantize(self) -> Tensor:
        """The weight [O, I] in float32."""
        outputs = len(self.words_OW)
        spans = self.words_OW.view(outputs, -1, 1, 16, 1)
        shifts = torch.arange(0, 16, 4, device=spans.device).view(4, 1, 1) + torch.tensor([0, 16], device=spans.device)
        numbers_OI = (spans >> shifts & _TOP).reshape(outputs, -1)
        scale_OI, minimum_OI = self.scales_GO2.permute(2, 1, 0).float().repeat_interleave(self.group, 2)
        weight_OI: Tensor = numbers_OI * scale_OI + minimum_OI
        return weight_OI[:, : self.inputs]


def pack(numbers_OI: Tensor, scale_OG: Tensor, minimum_OG: Tensor, group: int) -> Packed:
    """Numbers from 0 to 15, one in a byte, with float16 scales and minima of whole groups; what is padded is 0."""
    outputs, inputs = numbers_OI.shape
    missing = -inputs % SPAN
    numbers = F.pad(numbers_OI, (0, missing)).view(outputs, -1, 4, 16, 2).to(torch.int32)
    words = numbers.new_zeros(outputs, numbers.shape[1], 16)
    for place in range(4):
        words |= numbers[:, :, place, :, 0] << 4 * place
        words |= numbers[:, :, place, :, 1] << 4 * place + 16
    groups = (inputs + missing) // group
    scales_GO2 = torch.stack([F.pad(part, (0, groups - part.shape[1])).T for part in (scale_OG, minimum_OG)], dim=2)
    return Packed(words.flatten(1), scales_GO2, inputs, group)


def pack_blocks(weight: Blocks) -> Packed:
    """Blocks of 4 bits: what they stand for, to the last bit. Raises ValueError for those of 8."""
    if weight.minimum_OG is None:
        raise ValueError(f"these blocks are of {weight.bits} bits, not of 4")
    return pack(weight.numbers_OI, weight.scale_OG, weight.minimum_OG, blocks.GROUP)


def quantize(weight_OI: Tensor, group: int) -> Packed:
    """Rounds to the nearest of 16 numbers that are spread evenly from a group's least weight to its greatest.

    Inputs that do not fill the last group leave it smaller. Raises ValueError for a size of groups that does not
    exist, and for weights that are not finite or beyond float16.
    """
    if group not in GROUPS:
        raise ValueError(f"a group has {', '.join(map(str, GROUPS))} inputs, not {group}")
    outputs, inputs = weight_OI.shape
    missing = -inputs % group
    # What is missing repeats the last weight, which widens no group.
    padded = F.pad(weight_OI[None].float(), (0, missing), mode="replicate")[0] if missing else weight_OI.float()
    weights_OGX = padded.view(outputs, -1, group)
    minimum_OG = weights_OGX.amin(-1).half()
    weights_OGX = weights_OGX - minimum_OG[..., None].float()
    scale_OG = (weights_OGX.amax(-1).clamp(min=0) / _TOP).half()
    if not bool(scale_OG.isfinite().all() and minimum_OG.isfinite().all()):
        raise ValueError("some weights are not finite, or too large for a scale in 16 bits")
    factor_OG = torch.where(scale_OG == 0, 0.0, scale_OG.float().reciprocal())
    numbers = (weights_OGX * factor_OG[..., None]).round_().clamp_(0, _TOP).to(torch.uint8)
    return pack(numbers.flatten(1)[:, :inputs], scale_OG, minimum_OG, group)


def product(x_TI: Tensor, weight: Packed, bias_O: Tensor | None) -> Tensor:
    """y = x weight^T + bias in float32, rounded to the type of x at last."""
    y_TO = F.linear(x_TI.float(), weight.dequantize(), None if bias_O is None else bias_O.float())
    return y_TO.to(x_TI.dtype)
