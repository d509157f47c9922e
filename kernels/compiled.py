"""Triton kernels as machine code for GPUs that need not be there: what each takes of a multiprocessor.

    python -m kernels.compiled          prints the table
    python -m kernels.compiled --write  writes it into kernels/README.md

Needs a process without TRITON_INTERPRET: what is interpreted cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.examples import launches
from kernels.launch import Chip, Launch, interpreted
from kernels.shapes import SHAPES

TARGETS = {80: 108, 90: 132, 100: 148}
"""Compute capabilities and their multiprocessors: A100, H100 and B200."""
MAY_SPILL = {("float32", 100)}
"""Exact sums beside fp8 weights or caches on a B200 lack 2 to 4 registers: a pair that is there to be tested."""
README = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- made by python -m kernels.compiled --write -->\n", "<!-- end -->\n"
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Figures(NamedTuple):
    """What one kernel takes on one target."""

    kernel: str
    shape: str
    target: int
    registers: int  # of each thread, 255 at most
    spilled: int  # bytes of each thread that lie in memory because registers do not suffice
    shared: int  # bytes of each program
    warps: int
    blocks: str


def compile_launch(launch: Launch, target: int) -> Any:
    """The compiled kernel, for arguments as Triton would see them at that launch. Raises what the compiler does."""
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted in this process and cannot be compiled")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if name in launch.constants:
            signature[name] = "constexpr"
            continue
        given = launch.given[index]
        aligned = False
        if given is None or (type(given) is int and given == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", given
        elif isinstance(given, torch.Tensor):
            signature[name] = _TYPES[given.dtype]
            aligned = not parameter.do_not_specialize_on_alignment
        elif isinstance(given, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if given < 2**31 else "i64"
            aligned = given % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)


def measure(kernel: str, shape: str, launch: Launch, target: int) -> Figures:
    """Compiles it and reads the figures from the machine code."""
    compiled = compile_launch(launch, target)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    blocks = " x ".join(str(value) for name, value in launch.constants.items() if name.startswith("BLOCK"))
    spilled = found["STACK"] + found["LOCAL"]
    return Figures(kernel, shape, target, found["REG"], spilled, compiled.metadata.shared, launch.warps, blocks)


def figures(
    shapes: Sequence[str] = (), kernels: Sequence[str] = (), targets: Sequence[int] = tuple(TARGETS)
) -> list[Figures]:
    """Of the shapes and kernels that are named; of all where none is."""
    chosen = [shape for shape in SHAPES if not shapes or shape.name in shapes]
    return [
        measure(kernel, shape.name, launch, target)
        for shape in chosen
        for target in targets
        for kernel, launch in launches(shape, Chip(target, TARGETS[target]))
        if not kernels or kernel in kernels
    ]


def table(found: Iterable[Figures]) -> str:
    """One line for a kernel and shape, all targets in it."""
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for one in found:
        figures_of_target = f"{one.blocks}, {one.warps} warps: {one.registers}, {one.spilled}, {one.shared:,}"
        lines.setdefault((one.shape, one.kernel), {})[one.target] = figures_of_target
    text = "| shape | kernel |" + "".join(f" sm_{target} |" for target in TARGETS) + "\n|---|---|---|---|\n"
    for (shape, kernel), each in lines.items():
        text += f"| {shape} | {kernel} | {' | '.join(each.get(target, '') for target in TARGETS)} |\n"
    return text


def main(arguments: Sequence[str]) -> int:
    """Prints or writes the table; 1 where a kernel spills that may not."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compiled", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true", help="write the table into kernels/README.md")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--shape", action="append", default=[], choices=[shape.name for shape in SHAPES])
    parser.add_argument("--kernel", action="append", default=[], help="a kernel's name as in the table")
    parser.add_argument("--target", action="append", default=[], type=int, choices=list(TARGETS))
    given = parser.parse_args(arguments)
    found = figures(given.shape, given.kernel, given.target or tuple(TARGETS))
    if given.json:
        print(json.dumps([each._asdict() for each in found]))
    elif given.write:
        text = README.read_text()
        head, rest = text.split(_BEGIN)
        README.write_text(head + _BEGIN + table(found) + _END + rest.split(_END)[1])
    else:
        print(table(found), end="")
    return int(any(each.spilled and (each.shape, each.target) not in MAY_SPILL for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
