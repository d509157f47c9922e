"""The native kernels by themselves: products by kind, and a step of a model of 135 M weights split by op.

python -m tests.bench.kernels [--kinds q4 f16] [--threads 2] [--repeats 20] [--isa auto]

Weights are random, of SmolLM2-135M's shapes: 30 layers, 576 wide, 9 query and 3 key heads of 64, 1,536 in the
feed-forward, 49,152 tokens. Every figure is the least of its repeats: other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from ctypes import addressof, c_double, c_int, c_void_p
from typing import TypeVar

import torch

from kernels.linear.blocks import Blocks
from kernels.native import library as c
from kernels.native.program import OUTPUT, Op
from services.worker.cache import KVCache, KvLayout
from services.worker.step import CacheShape
from tests.kernels.native import instruction, product

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, INNER, VOCABULARY = 30, 576, 9, 3, 64, 1536, 49152
BLOCK, CONTEXT, BLOCKS = 64, 257, 400
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KINDS = ("q4", "q8", *DTYPES)
Kept = TypeVar("Kept")


def weight(library: c.Library, kind: str, outputs: int, inputs: int) -> c.PackedWeight:
    """A random one."""
    if kind in DTYPES:
        return c.PackedWeight(library, torch.randn(outputs, inputs).mul_(0.05).to(DTYPES[kind]))
    bits = 4 if kind == "q4" else 8
    numbers = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scale = torch.full((outputs, inputs // 32), 0.05 / 2 ** (bits - 2), dtype=torch.float16)
    return c.PackedWeight(library, Blocks(numbers, scale, -scale * 2 ** (bits - 1) if bits == 4 else None, bits))


def least(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


class Model:
    """The instructions of a forward pass with its head on every token."""

    def __init__(self, library: c.Library, kind: str, threads: int) -> None:
        self.library, self.pool = library, c.Pool(library, threads, 4000)
        self.lines: list[c.Instruction] = []
        self.labels: list[str] = []
        self.kept: list[object] = []
        self.rounded = weight(library, kind, 32, 32).inputs
        head = weight(library, "q8" if kind == "q4" else kind, VOCABULARY, WIDTH)
        widths = (WIDTH, WIDTH, (HEADS + 2 * KV_HEADS) * SIZE, SIZE, WIDTH, 2 * INNER, INNER)
        self.buffers = [c.Buffer(width, c.Inputs.FLOATS) for width in widths]
        self.residual, self.x, self.qkv, self.angles, self.mixed, self.wide, self.inner = map(
            self.view, range(len(widths))
        )
        self.norm = torch.ones(WIDTH)
        self.add("embedding", Op.EMBEDDING, y=self.residual, weight=self.keep(head).address)
        frequency = self.keep(10000.0 ** -(torch.arange(SIZE // 2) * 2 / SIZE))
        self.add("angles", Op.ROPE_ANGLES, y=self.angles, number=1.0, weight=frequency.data_ptr())
        entry = self.norms(Op.RMS_NORM, x=self.residual)
        for layer in range(LAYERS):
            entry = self.layer(kind, layer, entry)
        self.product("head", head, self.x, c.View(OUTPUT, 0, VOCABULARY))
        program = c.CompiledProgram(library, self.lines, self.buffers)
        self.program, self.address = program, program._address
        shape = KvLayout(LAYERS, KV_HEADS, SIZE, library.cache_dtype, lambda tokens, heads, size: (heads, tokens, size))
        self.cache = KVCache(shape, CacheShape(BLOCKS, BLOCK, 64, 4096, 512), torch.device("cpu")).tensor

    def view(self, buffer: int) -> c.View:
        return c.View(buffer, 0, self.buffers[buffer].width)

    def keep(self, what: Kept) -> Kept:
        self.kept.append(what)
        return what

    def add(self, label: str, op: Op, **fields: object) -> None:
        self.labels.append(label)
        self.lines.append(instruction(op, **fields))

    def product(self, label: str, packed: c.PackedWeight, x: c.View, y: c.View) -> None:
        """x is rounded first where the weight is quantized: by what makes it, if that goes token by token."""
        if packed.inputs is not c.Inputs.FLOATS:
            self.buffers.append(c.Buffer(x.width, packed.inputs))
            rounded = len(self.buffers) - 1
            if self.lines[-1].op == Op.ATTENTION:
                self.add("rounding", Op.QUANTIZE, x=x, quantized=rounded)
            else:
                self.lines[-1].quantized = rounded
            x = self.view(rounded)
        self.add(label, Op.LINEAR, x=x, y=y, weight=self.keep(packed).address)

    def norms(self, op: Op, **fields: object) -> c.View:
        self.add("norms", op, y=self.x, number=1e-5, weight=self.norm.data_ptr(), **fields)
        return self.x

    def layer(self, kind: str, layer: int, x: c.View) -> c.View:
        made = {
            name: weight(self.library, kind, outputs, inputs)
            for name, outputs, inputs in (
                ("qkv", self.qkv.width, WIDTH),
                ("out", WIDTH, WIDTH),
                ("gate and up", 2 * INNER, WIDTH),
                ("down", WIDTH, INNER),
            )
        }
        q, k = c.View(2, 0, HEADS * SIZE), c.View(2, HEADS * SIZE, KV_HEADS * SIZE)
        v = c.View(2, (HEADS + KV_HEADS) * SIZE, KV_HEADS * SIZE)
        qk = c.View(2, 0, (HEADS + KV_HEADS) * SIZE)
        self.product("qkv", made["qkv"], x, self.qkv)
        self.add("rope", Op.ROPE, x=qk, y=qk, z=self.angles, heads=HEADS + KV_HEADS)
        self.add("kv write", Op.KV_WRITE, x=k, z=v, layer=layer)
        self.add("attention", Op.ATTENTION, x=q, y=self.mixed, layer=layer, heads=HEADS, number=SIZE**-0.5)
        self.product("out", made["out"], self.mixed, self.x)
        self.norms(Op.ADD_RMS_NORM, x=self.x, z=self.residual)
        self.product("gate and up", made["gate and up"], self.x, self.wide)
        self.add("silu", Op.SILU_MUL, x=self.wide, y=self.inner)
        self.product("down", made["down"], self.inner, self.x)
        return self.norms(Op.ADD_RMS_NORM, x=self.x, z=self.residual)

    def step(self, rows: int, new: int, context: int, shared: int = 0) -> Callable[[], None]:
        """A run of so many rows of `new` tokens, which bring each to `context`; they begin with the same blocks."""
        tokens, width, same = rows * new, -(-context // BLOCK), shared // BLOCK
        blocks = torch.randperm(BLOCKS)[: same + rows * (width - same)].to(torch.int32)
        table = torch.cat((blocks[:same].expand(rows, same), blocks[same:].view(rows, width - same)), 1).contiguous()
        positions = torch.arange(context - new, context).repeat(rows)
        slots = (
            table.repeat_interleave(new, 0).long().gather(1, positions[:, None] // BLOCK)[:, 0] * BLOCK
            + positions % BLOCK
        )
        ids = torch.randint(0, VOCABULARY, (tokens,))
        starts, contexts = (
            torch.arange(rows + 1, dtype=torch.int32) * new,
            torch.full((rows,), context, dtype=torch.int32),
        )
        out = torch.empty(tokens, VOCABULARY)
        prompts = torch.full((rows,), new if new > 1 else 0, dtype=torch.int32)
        step = c.StepOfC(
            tokens=tokens,
            rows=rows,
            table_width=width,
            ids=ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            row_starts=starts.data_ptr(),
            contexts=contexts.data_ptr(),
            blocks=table.data_ptr(),
            cache=self.cache.data_ptr(),
            cache_layer=self.cache.stride(0),
            block_size=BLOCK,
            kv_heads=KV_HEADS,
            head_size=SIZE,
            output=out.data_ptr(),
            prompts=prompts.data_ptr(),
        )
        arrays = (table, positions, slots, ids, starts, contexts, out, prompts)

        def run() -> None:
            assert arrays[0].numel() == rows * width  # they live as long as this does
            self.program.run(self.pool, step)

        return run

    def split(self, run: Callable[[], None], repeats: int) -> dict[str, float]:
        """Milliseconds by label, of the fastest run."""
        calls = self.library.calls
        calls.triptych_profile.argtypes, calls.triptych_times.argtypes = (c_void_p, c_int), (c_void_p, c_void_p)
        best: list[float] = []
        for _ in range(repeats):
            calls.triptych_profile(self.address, 1)
            run()
            times = (c_double * len(self.lines))()
            calls.triptych_times(self.address, addressof(times))
            best = min(best or list(times), list(times), key=sum)
        calls.triptych_profile(self.address, 0)
        parts: dict[str, float] = {}
        for label, seconds in zip(self.labels, best, strict=True):
            parts[label] = parts.get(label, 0.0) + seconds * 1e3
        return dict(sorted(parts.items(), key=lambda part: -part[1]))


def products(library: c.Library, kinds: list[str], threads: int, repeats: int) -> None:
    """Multiply-adds a second of one product, its inputs' rounding among them."""
    for kind in kinds:
        packed = weight(library, kind, 2 * INNER, WIDTH)
        figures = []
        for tokens in (1, 8, 64, 512):
            x = torch.randn(tokens, WIDTH)
            seconds = least(lambda x=x, packed=packed: product(library, packed, x, threads), repeats)  # type: ignore[misc]
            figures.append(f"{tokens} tokens {tokens * 2 * INNER * WIDTH / seconds / 1e9:6.1f}")
        print(f"product  {kind:4}  {', '.join(figures)} GMAC/s, {threads} threads")


def steps(library: c.Library, kinds: list[str], threads: int, repeats: int) -> None:
    """Whole steps, and their parts."""
    for kind in kinds:
        model = Model(library, kind, threads)
        for name, rows, new, context, shared in (
            *((f"{rows} x 1", rows, 1, CONTEXT, 0) for rows in (1, 8, 32, 64)),
            ("1 x 1, long", 1, 1, 4000, 0),
            ("32 x 1, same", 32, 1, 1153, 1024),  # after one beginning of 1,024 tokens
            ("prefill 512", 1, 512, 512, 0),
        ):
            run = model.step(rows, new, context, shared)
            turns = max(3, repeats if rows == 1 and new == 1 else repeats // 4)
            whole = least(run, turns) * 1e3
            parts = ", ".join(f"{label} {ms:.2f}" for label, ms in model.split(run, turns).items() if ms >= 0.005)
            print(f"step  {kind:4}  {name:12}  {whole:8.2f} ms  {rows * new / whole * 1e3:7.0f} tokens/s  ({parts})")


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["q4", "f16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--isa", default="auto")
    options = parser.parse_args()
    library = c.load(options.isa)
    print(f"native kernels: {library.level}, vectors of {library.width}")
    products(library, options.kinds, options.threads, options.repeats)
    steps(library, options.kinds, options.threads, options.repeats)


if __name__ == "__main__":
    main()
