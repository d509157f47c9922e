"""How a model's passes become compiled pieces: what is refused, and what the log says of it."""

from __future__ import annotations

from typing import Any

import torch

from kernels.media.encoder import Mathematics, Sizes
from kernels.ops import Ops
from kernels.piecewise.encoder import EncoderPass
from kernels.piecewise.ops import piecewise_ops
from kernels.piecewise.running import Hooks
from services.common.errors import InvalidArgument
from services.common.logs import Log

_log = Log("worker.compiled")


class Compiled:
    """Makes the ops of one model over pieces. The pieces of all its passes are in one compiler."""

    def __init__(self, ops: Ops[Any], device: torch.device, *, deterministic: bool) -> None:
        """Raises InvalidArgument where the ops, or what is asked of rows, leave nothing to compile."""
        if ops.name == "native":
            raise InvalidArgument(
                "native kernels run a program of their own, and compile has nothing to add: add --ops triton, torch or"
                " reference, or leave it out",
                field="compile",
            )
        if deterministic:
            raise InvalidArgument(
                "deterministic asks for rows that are equal to the last bit in every batch, which compiled code does"
                " not promise: leave out one of compile and deterministic",
                field="compile",
            )
        from kernels.piecewise.compiler import Compiler  # what it imports takes a second that others need not wait

        self._ops = ops
        self._compiler = Compiler(device, warn=_log.warning)

    def over(self, ops: Ops[torch.Tensor], hooks: Hooks | None = None) -> Ops[Any]:
        """The same ops, whose passes are pieces."""
        return piecewise_ops(ops, hooks, self._compiler)

    def encoder(self, mathematics: Mathematics[Any], sizes: Sizes) -> EncoderPass:
        """A pass of an encoder of media as pieces. See kernels.media.encoder.Compile."""
        return EncoderPass(self._ops, self._compiler, mathematics, sizes)

    def report(self) -> None:
        """Says in the log what was made."""
        done = self._compiler.counts
        _log.info("pieces", compiled=done.compiled, found=done.found, seconds=round(done.seconds, 3))
