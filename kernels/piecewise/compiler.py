"""Compiled pieces: found in this process, on disk, or made. What cannot be compiled runs uncompiled, with a warning."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels.piecewise import cache
from kernels.piecewise.lowering import OPTIONS, Compiled, compile_piece, load_piece
from kernels.piecewise.pieces import Piece

_FAULTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError)
"""What a compiler raises that is not there, or that meets what it does not know: it has no tree of errors of its own.
ValueErrors are ours."""


@dataclass(slots=True)
class Counts:
    """What was done so far."""

    compiled: int = 0
    found: int = 0  # on disk
    seconds: float = 0.0  # of both


@dataclass(slots=True)
class Compiler:
    """Makes each distinct piece once."""

    device: torch.device
    folder: Path = field(default_factory=cache.default_folder)
    warn: Callable[[str], None] = field(default=lambda message: None)
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    counts: Counts = field(default_factory=Counts)
    _made: dict[str, Compiled] = field(default_factory=dict)
    _own: Path | None = None
    """A folder of this process, where the other cannot be written."""
    _failed: bool = False

    def __call__(self, piece: Piece) -> Compiled | None:
        """The piece as a function of its inputs and weights; None where it cannot be compiled.

        After one failure nothing is compiled any more: the next piece would fail as late and for the same reason.
        """
        if piece.key not in self._made and not self._failed:
            begun = time.monotonic()
            try:
                self._made[piece.key] = self._find(piece)
            except _FAULTS as error:
                self._failed = True
                self.warn(f"the compiler failed, and the model runs without it: {_why(error)}")
            self.counts.seconds += time.monotonic() - begun
        return self._made.get(piece.key)

    def _find(self, piece: Piece) -> Compiled:
        entry = cache.Entry.of(self.folder, cache.environment(self.device, self.options), piece.key, piece.text)
        fault = entry.fault()
        if fault is None:
            try:
                made = load_piece(entry.artifact, self._libraries(entry), self.options)
                self.counts.found += 1
                return made
            except _FAULTS as error:
                fault = f"{type(error).__name__}: {error}"
                with suppress(OSError):
                    (entry.folder / "sums").write_text("")
        if fault:
            self.warn(f"a compiled piece is made again: in {entry.folder}, {fault}")
        if not entry.can_be_written():
            if self._own is None:
                self.warn(f"compiled pieces are not kept, since {self.folder} cannot be written")
            entry = entry.below(self._own_folder())
        with entry.writing() as new:
            made = compile_piece(piece, self.device, new.artifact, new.libraries, self.options)
        self.counts.compiled += 1
        return made

    def _libraries(self, entry: cache.Entry) -> Path:
        """The entry's, or a copy where they cannot be written: who loads them takes locks beside them."""
        if os.access(entry.libraries, os.W_OK):
            return entry.libraries
        return Path(shutil.copytree(entry.libraries, entry.below(self._own_folder()).libraries, dirs_exist_ok=True))

    def _own_folder(self) -> Path:
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="triptych-pieces-"))
            atexit.register(shutil.rmtree, self._own, ignore_errors=True)  # pieces outlive who made them
        return self._own


def _why(error: BaseException) -> str:
    """The first line of an error, and the first that a C++ compiler said of its own."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    said = next((line.strip() for line in others if "error:" in line or "failed:" in line), None)
    return first if said is None else f"{first}: {said}"
