"""One launch of a Triton kernel, as data: what runs it on a GPU is what is compiled where there is none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton


class Launch(NamedTuple):
    """A kernel with everything that it is given."""

    kernel: Any
    grid: tuple[int, ...]  # programs along each axis; none of them: nothing to do
    given: tuple[Any, ...]  # tensors, numbers and None for an absent tensor, in the order of the signature
    constants: dict[str, Any]  # flags and blocks: what another machine code is compiled for
    warps: int = 4
    stages: int = 3
    fused: bool = True  # whether a product and a sum may be rounded as one

    @property
    def options(self) -> dict[str, int]:
        """What Triton compiles and starts it with."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fused}

    def run(self) -> None:
        """Starts it on the current device; what it writes is ready in the order of the stream."""
        if all(self.grid):
            self.kernel[self.grid](*self.given, **self.constants, **self.options)


class Chip(NamedTuple):
    """What blocks and grids are chosen by."""

    capability: int  # 80 is an A100, 90 an H100
    cores: int  # multiprocessors


def chip_of(device: torch.device) -> Chip:
    """The GPU's; an H100 where there is none."""
    if device.type != "cuda":
        return Chip(90, 132)
    found = torch.cuda.get_device_properties(device)
    return Chip(found.major * 10 + found.minor, found.multi_processor_count)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter: TRITON_INTERPRET was set before they were imported."""
    return bool(triton.knobs.runtime.interpret)


def rows_of(x_XD: torch.Tensor) -> torch.Tensor:
    """[rows, D] of any [..., D]: the last axis without gaps, which is what kernels of rows read."""
    x_RD = x_XD.reshape(-1, x_XD.shape[-1])
    return x_RD if x_RD.stride(-1) == 1 else x_RD.contiguous()


def power_of_two(count: int, least: int = 1) -> int:
    """The first power of two that is not under `count` or `least`: what Triton's blocks are."""
    return max(least, 1 << max(0, count - 1).bit_length())
