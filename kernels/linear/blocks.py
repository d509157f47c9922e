"""Quantized weights as every part of the system hands them on: small numbers, with a scale for each group of 32.

    4 bits    weight = scale * number + minimum           number from 0 to 15
    8 bits    weight = scale * (number - 128)             number from 0 to 255

O outputs   I inputs, a multiple of 32   G = I / 32 groups. A number has a byte to itself here, whatever its bits:
an implementation packs them as it reads them, and keeps nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

GROUP = 32
ZERO = 128
"""The number of 8 bits that stands for nothing."""
_AT_ONCE = 1 << 19
"""Weights that are worked on at once: little memory beside the result, and it stays in the cache."""


@dataclass(slots=True, frozen=True)
class Blocks:
    """A quantized weight [O, I]. Raises ValueError for parts that do not belong together."""

    numbers_OI: Tensor  # uint8
    scale_OG: Tensor  # float16
    minimum_OG: Tensor | None  # float16; 8 bits have none
    bits: int  # 4 or 8

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or (self.bits == 4) != (self.minimum_OG is not None):
            raise ValueError(f"{self.bits} bits {'with' if self.minimum_OG is not None else 'without'} a minimum")
        outputs, inputs = self.numbers_OI.shape
        if inputs % GROUP or self.numbers_OI.dtype != torch.uint8:
            raise ValueError(
                f"numbers are {self.numbers_OI.dtype} for {inputs} inputs, not bytes for groups of {GROUP}"
            )
        for part in (self.scale_OG, self.minimum_OG):
            if part is not None and (part.shape != (outputs, inputs // GROUP) or part.dtype != torch.float16):
                raise ValueError(
                    f"a scale or minimum is {part.dtype} {list(part.shape)}, not float16 [{outputs}, {inputs // GROUP}]"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.numbers_OI.shape
        return outputs, inputs

    @property
    def nbytes(self) -> int:
        """Bytes once it is packed: the numbers in their bits, and two for each scale and minimum."""
        halves = self.scale_OG.numel() * (1 if self.minimum_OG is None else 2)
        return self.numbers_OI.numel() * self.bits // 8 + 2 * halves

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [O, I]; in float32 to the last bit what the numbers say."""
        weight_OI = torch.empty(self.shape, dtype=dtype, device=self.numbers_OI.device)
        for part in _parts(*self.shape):
            weights = torch.unflatten(self.numbers_OI[part].float(), 1, (-1, GROUP))
            if self.minimum_OG is None:
                weights.sub_(ZERO).mul_(self.scale_OG[part, :, None].float())
            else:
                weights.mul_(self.scale_OG[part, :, None].float()).add_(self.minimum_OG[part, :, None].float())
            weight_OI[part] = weights.flatten(1)
        return weight_OI

    def rows(self, index: Tensor | slice) -> Blocks:
        """Some of the outputs, in the order of `index`."""
        minimum_OG = None if self.minimum_OG is None else self.minimum_OG[index]
        return Blocks(self.numbers_OI[index], self.scale_OG[index], minimum_OG, self.bits)

    def with_8_bits(self) -> Blocks:
        """The same in 8 bits: without loss where every minimum is a whole number of scales, as in Q4_0."""
        if self.minimum_OG is None:
            return self
        scale_OG, minimum_OG = self.scale_OG.float(), self.minimum_OG.float()
        zero_OG = torch.where(scale_OG == 0, 0.0, minimum_OG / scale_OG)
        if bool(((zero_OG * scale_OG == minimum_OG) & (zero_OG == zero_OG.round()) & (zero_OG.abs() <= 112)).all()):
            shift_OI = zero_OG.to(torch.int16).add_(ZERO).repeat_interleave(GROUP, 1)
            return Blocks(shift_OI.add_(self.numbers_OI).to(torch.uint8), self.scale_OG, None, 8)
        return Blocks.of(self.dequantize())

    @staticmethod
    def concat(parts: Sequence[Blocks]) -> Blocks:
        """Outputs of one input under one another; all in 8 bits where some are."""
        if len(parts) == 1:
            return parts[0]
        if len({part.bits for part in parts}) > 1:
            parts = [part.with_8_bits() for part in parts]
        minima = [part.minimum_OG for part in parts if part.minimum_OG is not None]
        return Blocks(
            torch.cat([part.numbers_OI for part in parts]),
            torch.cat([part.scale_OG for part in parts]),
            torch.cat(minima) if minima else None,
            parts[0].bits,
        )

    @staticmethod
    def of(weight_OI: Tensor, bits: int = 8) -> Blocks:
        """Rounds to the nearest numbers.

        8 bits spread evenly around zero, 4 bits from a group's least weight to its greatest. Raises ValueError where
        inputs do not fill whole groups, and for weights that are not finite or so large that no scale holds them.
        """
        outputs, inputs = weight_OI.shape
        if bits not in (4, 8) or inputs % GROUP:
            raise ValueError(f"{inputs} inputs do not make groups of {GROUP} with numbers of {bits} bits")
        numbers_OI = torch.empty(outputs, inputs, dtype=torch.uint8)
        scale_OG = torch.empty(outputs, inputs // GROUP, dtype=torch.float16)
        minimum_OG = torch.empty_like(scale_OG) if bits == 4 else None
        for part in _parts(outputs, inputs):
            weights = torch.unflatten(weight_OI[part].float(), 1, (-1, GROUP))
            if minimum_OG is None:
                low, top = float(-ZERO), 127.0
                scale = _half(weights.abs().amax(-1), top)
            else:
                low, top = 0.0, 15.0
                minimum = weights.amin(-1).half()
                minimum_OG[part] = minimum
                weights = weights - minimum[..., None].float()
                scale = _half(weights.amax(-1).clamp_(min=0), top)
            scale_OG[part] = scale
            numbers = (weights * torch.where(scale == 0, 0.0, scale.float().reciprocal())[..., None]).round_()
            numbers_OI[part] = numbers.clamp_(low, top).sub_(low).to(torch.uint8).flatten(1)
        _refuse_infinite(scale_OG, minimum_OG)
        return Blocks(numbers_OI, scale_OG, minimum_OG, bits)


def _half(most: Tensor, top: float) -> Tensor:
    """A scale for numbers up to `top`: rounded up where, rounded down, `most` would lie half a number beyond."""
    scale = (most / top).half()
    return torch.where(scale.float() * (top + 0.5) < most, (scale.view(torch.int16) + 1).view(torch.float16), scale)


def _refuse_infinite(*parts: Tensor | None) -> None:
    if not all(bool(part.isfinite().all()) for part in parts if part is not None):
        raise ValueError("some weights are not finite, or too large for a scale in 16 bits")


def _parts(outputs: int, inputs: int) -> Iterator[slice]:
    """All rows, some at a time."""
    step = max(1, _AT_ONCE // max(1, inputs))
    return (slice(first, first + step) for first in range(0, outputs, step))
