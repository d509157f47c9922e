"""Records a forward pass: a model's mathematics runs once over symbols, and each op adds an instruction.

    symbol        columns of a value, as a tensor's view would be: value | at ..... at + width |
    value         one array of the step, so many numbers per token
    buffer        memory; values that do not live at the same time share one

A value that was rounded for a quantized product is a value of its own. It is written by the instruction that
writes the floats wherever that goes token by token, else by a QUANTIZE. Ops that work in place (rope, qk_norm, the
sum in add_rms_norm) return a new symbol; the old one must not be read any more, and reading it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from kernels.native import library as c
from kernels.native.library import Inputs, PackedWeight

OUTPUT = -1
"""The buffer that is not a buffer: the step's output."""


class Op(IntEnum):
    """What an instruction does; src/program.cpp says how."""

    EMBEDDING = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    QUANTIZE = 3
    LINEAR = 4
    ROPE_ANGLES = 5
    ROPE = 6
    KV_WRITE = 7
    ATTENTION = 8
    SILU_MUL = 9
    TAKE = 10
    LARGEST = 11
    ROPE_AXES = 12
    REPLACE_ROWS = 13
    ADD_ROWS = 14
    LINEAR_LARGEST = 15
    LARGEST_PAIR = 16


_BY_TOKEN = frozenset(Op) - {Op.LINEAR, Op.LINEAR_LARGEST, Op.ATTENTION}
"""Ops that read and write one token at a time: what they write may lie where something lay that they read last."""


@dataclass(slots=True, eq=False)
class Value:
    """One array: `width` numbers per token."""

    recorder: Recorder
    width: int
    inputs: Inputs = Inputs.FLOATS
    maker: int = 0  # the instruction that writes it first
    last: int = 0  # and the last that touches it
    rounded: dict[Inputs, Value] = field(default_factory=dict)
    changes: list[tuple[int, int, int]] = field(default_factory=list)  # instruction, from column, to column


@dataclass(slots=True, frozen=True, eq=False)
class Symbol:
    """Stands for a tensor of one row per token."""

    value: Value
    at: int
    width: int
    heads: int = 1
    made: int = 0  # how many instructions there were

    @property
    def recorder(self) -> Recorder:
        """What records it."""
        return self.value.recorder

    @property
    def whole(self) -> bool:
        """Whether it is all of its value."""
        return self.at == 0 and self.width == self.value.width


@dataclass(slots=True)
class Line:
    """One instruction, before buffers are known."""

    op: Op
    x: Symbol | None = None
    y: Symbol | None = None
    z: Symbol | None = None
    quantized: Value | None = None
    layer: int = 0
    heads: int = 1
    window: int = 0
    number: float = 0.0
    weight: PackedWeight | torch.Tensor | None = None

    def values(self) -> Iterator[Value]:
        """All that it touches."""
        yield from (symbol.value for symbol in (self.x, self.y, self.z) if symbol is not None)
        if self.quantized is not None:
            yield self.quantized


class Recorder:
    """Collects instructions; symbols lead back to it."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.output: Value | None = None

    def start(self) -> Symbol:
        """Stands for what a step brings besides floats: ids and positions, which instructions read by themselves."""
        return Symbol(Value(self, 0), 0, 0)

    def new(self, width: int, heads: int = 1) -> Symbol:
        """A value that the next instruction writes."""
        return Symbol(Value(self, width, maker=len(self.lines)), 0, width, heads, len(self.lines) + 1)

    def add(self, line: Line) -> None:
        """Appends an instruction. Raises ValueError where it reads what has been overwritten."""
        number = len(self.lines)
        for symbol in (line.x, line.z):
            if symbol is not None:
                for change, first, end in symbol.value.changes:
                    if change >= symbol.made and first < symbol.at + symbol.width and symbol.at < end:
                        raise ValueError(f"{line.op.name} reads what instruction {change} has overwritten")
        for value in line.values():
            value.last = number
        self.lines.append(line)

    def changed(self, symbol: Symbol) -> Symbol:
        """The same columns after the last instruction, which overwrote them."""
        symbol.value.changes.append((len(self.lines) - 1, symbol.at, symbol.at + symbol.width))
        return Symbol(symbol.value, symbol.at, symbol.width, symbol.heads, len(self.lines))

    def rounded(self, x: Symbol, inputs: Inputs) -> Symbol:
        """x as numbers for a quantized product."""
        known = x.value.rounded.get(inputs) if x.whole and not x.value.changes else None
        if known is None:
            known = Value(self, x.width, inputs, maker=len(self.lines))
            maker = self.lines[x.value.maker] if x.whole and not x.value.changes else None
            if maker is not None and maker.op in _BY_TOKEN and maker.quantized is None and maker.heads == 1:
                maker.quantized, known.maker = known, x.value.maker
            else:
                self.add(Line(Op.QUANTIZE, x=x, quantized=known))
            if not x.value.changes:
                x.value.rounded[inputs] = known
        return Symbol(known, 0, x.width, made=len(self.lines))

    def finish(self, symbol: Symbol) -> None:
        """The symbol is what a run gives."""
        if not symbol.whole:
            raise ValueError("a program gives all of a value, not a part")
        self.output = symbol.value
        symbol.value.last = len(self.lines)


@dataclass(slots=True, frozen=True)
class Listing:
    """A program with its buffers, in the order of their numbers."""

    lines: tuple[Line, ...]
    buffers: tuple[tuple[int, Inputs], ...]
    places: dict[Value, int]

    @staticmethod
    def of(recorder: Recorder) -> Listing:
        """Gives every value a buffer: one of its width that nobody needs any more, or a new one."""
        buffers: list[tuple[int, Inputs]] = []
        free: dict[tuple[int, Inputs], list[int]] = {}
        places: dict[Value, int] = {}

        def release(values: list[Value]) -> None:
            for value in values:
                if value is not recorder.output:
                    free.setdefault(_room(value), []).append(places[value])

        for number, line in enumerate(recorder.lines):
            ending = [value for value in dict.fromkeys(line.values()) if value.last == number and value.maker < number]
            starting = [value for value in dict.fromkeys(line.values()) if value not in places]
            for stage in ("end", "start") if line.op in _BY_TOKEN else ("start", "end"):
                if stage == "end":
                    release(ending)
                    continue
                for value in starting:
                    room = _room(value)
                    if value is recorder.output:
                        places[value] = OUTPUT
                    elif free.get(room):
                        places[value] = free[room].pop()
                    else:
                        places[value] = len(buffers)
                        buffers.append(room)
            release([value for value in starting if value.last == number])
        return Listing(tuple(recorder.lines), tuple(buffers), places)

    def compile(self, library: c.Library, cache_dtype: torch.dtype) -> c.CompiledProgram:
        """The same for C; `cache_dtype` is one of its caches."""
        instructions = [
            c.Instruction(
                line.op,
                self._view(line.x),
                self._view(line.y),
                self._view(line.z),
                -1 if line.quantized is None else self.places[line.quantized],
                line.layer,
                line.heads,
                line.window,
                line.number,
                _address(line.weight),
            )
            for line in self.lines
        ]
        return c.CompiledProgram(library, instructions, [c.Buffer(*room) for room in self.buffers], cache_dtype)

    def text(self) -> str:
        """One line per instruction, to read."""
        return "\n".join(f"{number:4} {self._line(line)}" for number, line in enumerate(self.lines))

    def _line(self, line: Line) -> str:
        read = [self._name(symbol) for symbol in (line.x, line.z) if symbol is not None]
        written = [] if line.y is None else [self._name(line.y)]
        if line.quantized is not None:
            written.append(f"b{self.places[line.quantized]} {line.quantized.inputs.name.lower()}")
        notes = [f"{key}={value}" for key, value in _notes(line).items()]
        return f"{line.op.name.lower():<12} {', '.join(read)} -> {', '.join(written)} {' '.join(notes)}".rstrip()

    def _name(self, symbol: Symbol) -> str:
        place = self.places[symbol.value]
        name = "out" if place == OUTPUT else f"b{place}"
        return name if symbol.whole else f"{name}[{symbol.at}:{symbol.at + symbol.width}]"

    def _view(self, symbol: Symbol | None) -> c.View:
        if symbol is None:
            return c.View(-1, 0, 0)
        return c.View(self.places[symbol.value], symbol.at, symbol.width)


def _room(value: Value) -> tuple[int, Inputs]:
    """The buffer that a value needs."""
    return value.width, value.inputs


def _address(weight: PackedWeight | torch.Tensor | None) -> int | None:
    if weight is None:
        return None
    return weight.data_ptr() if isinstance(weight, torch.Tensor) else weight.address


def _notes(line: Line) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if isinstance(line.weight, PackedWeight):
        notes["weight"] = f"{line.weight.kind.name}{list(line.weight.shape)}"
    if line.op in (Op.KV_WRITE, Op.ATTENTION):
        notes["layer"] = line.layer
    if line.op in (Op.REPLACE_ROWS, Op.ADD_ROWS):
        notes["part"] = line.layer
    if line.heads > 1:
        notes["heads"] = line.heads
    if line.window:
        notes["window"] = line.window
    if line.number:
        notes["number"] = f"{line.number:g}"
    return notes
