"""The interface to C: its structures, its functions with their types, its memory. As thin as it can be.

Every field stands as in src/program.cpp, which says what it means.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from weakref import finalize

import torch

from kernels.linear.blocks import Blocks
from kernels.native.build import Unavailable, find


class Kind(IntEnum):
    """How a weight is stored."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8 = 3
    Q4 = 4
    PAIRS = 5


class Inputs(IntEnum):
    """What a product reads: floats, or numbers that they were rounded to."""

    FLOATS = 0
    BYTES = 1
    WORDS = 2
    MIXED = 3
    SPLIT = 4


KINDS = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}
CACHES = {torch.float16: 0, torch.float32: 1, torch.int8: 2, torch.bfloat16: 3}
"""Types of a cache. One of bytes has a float per token and head behind them: what they are worth. bfloat16 is for
builds that multiply matrices (`Library.caches`)."""
_SCALE = 4
VECTOR = 16
"""Floats of the widest vector: a bias fills whole ones."""
_NO_MEMORY = -1
_ARENA = 64 << 20  # bytes; pages that nobody writes to take no memory
_ALIGNMENT = 64


class View(ctypes.Structure):
    """Columns [at, at + width) of a buffer."""

    _fields_ = (("buffer", c_int32), ("at", c_int32), ("width", c_int32))


class Instruction(ctypes.Structure):
    """One instruction of a program."""

    _fields_ = (
        ("op", c_int32),
        ("x", View),
        ("y", View),
        ("z", View),
        ("quantized", c_int32),
        ("layer", c_int32),
        ("heads", c_int32),
        ("window", c_int32),
        ("number", c_float),
        ("weight", c_void_p),
    )


class Buffer(ctypes.Structure):
    """Memory for one array of a step."""

    _fields_ = (("width", c_int32), ("inputs", c_int32))


class Weight(ctypes.Structure):
    """A packed weight."""

    _fields_ = (("kind", c_int32), ("outputs", c_int32), ("inputs", c_int32), ("data", c_void_p), ("bias", c_void_p))


class StepOfC(ctypes.Structure):
    """What one run of a program reads and writes."""

    _fields_ = (
        ("tokens", c_int32),
        ("rows", c_int32),
        ("table_width", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("row_starts", c_void_p),
        ("contexts", c_void_p),
        ("blocks", c_void_p),
        ("cache", c_void_p),
        ("cache_layer", c_int64),
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("input", c_void_p),
        ("output", c_void_p),
        ("axes", c_void_p),
        ("media_of", c_void_p),
        ("media", c_void_p),
        ("media_row", c_int64),
        ("prompts", c_void_p),
    )


class CutOfC(ctypes.Structure):
    """How a token is drawn from one row of logits."""

    _fields_ = (
        ("key", c_uint64),
        ("top_p", c_double),
        ("min_p", c_double),
        ("temperature", c_float),
        ("best", c_float),
        ("top_k", c_int32),
        ("row", c_int32),
    )


class Pages:
    """Memory on huge pages where the system has them; given back with the object."""

    def __init__(self, library: Library, size: int) -> None:
        self.size = size
        self.address: int | None = library.calls.triptych_pages(size)
        if not self.address:
            raise MemoryError(f"{size} bytes for weights")
        finalize(self, library.calls.triptych_pages_free, self.address)


class Arena:
    """Weights beside each other on the same pages: alone, each would take whole huge ones. Threads may share it."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = Lock()
        self._pages: Pages | None = None
        self._used = 0

    def take(self, size: int) -> tuple[Pages, int]:
        """An address with room for so many bytes, and the pages that must live as long as they are used."""
        with self._lock:
            if self._pages is None or self._used + size > self._pages.size:
                self._pages, self._used = Pages(self._library, max(size, _ARENA)), 0
            at = self._used
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
            assert self._pages.address is not None
            return self._pages, self._pages.address + at


class Pool:
    """The threads that run programs; they end with the object."""

    def __init__(self, library: Library, threads: int, spins: int) -> None:
        before = _threads()
        self.address: int = library.calls.triptych_pool(threads, spins)
        self._helpers = sorted(_threads() - before)
        self._spent = c_uint64.from_address(library.calls.triptych_spent(self.address))
        finalize(self, library.calls.triptych_pool_free, self.address)

    def spent_s(self) -> float:
        """Seconds that callers have been inside C, in programs and selections."""
        return 1e-9 * self._spent.value

    def pin(self) -> None:
        """This thread and the helpers keep to one core each, as far as there are cores."""
        cores = sorted(os.sched_getaffinity(0))
        for at, thread in enumerate((0, *self._helpers)):
            os.sched_setaffinity(thread, {cores[at % len(cores)]})


class PackedWeight:
    """A weight in the layout of this build, and its bias. A plain one multiplies floats, if it is not quantized."""

    def __init__(
        self,
        library: Library,
        weight_OI: torch.Tensor | Blocks,
        bias_O: torch.Tensor | None = None,
        arena: Arena | None = None,
        *,
        plain: bool = False,
    ) -> None:
        outputs, inputs = weight_OI.shape
        self.kind = library.kind_of(weight_OI, plain=plain)
        self.inputs = library.inputs_of(self.kind)
        self.shape = (outputs, inputs)
        self.row_items = library.row_items(outputs)
        self._size: int = library.calls.triptych_packed_bytes(self.kind, outputs, inputs)
        self.pages, data = (arena or Arena(library)).take(self._size)
        if isinstance(weight_OI, Blocks):
            numbers, scale = weight_OI.numbers_OI.contiguous(), weight_OI.scale_OG.contiguous()
            minimum = scale if weight_OI.minimum_OG is None else weight_OI.minimum_OG.contiguous()
            pointers = (numbers.data_ptr(), scale.data_ptr(), minimum.data_ptr())
            library.calls.triptych_pack_groups(self.kind, *pointers, outputs, inputs, data)
        else:
            values = weight_OI.contiguous()
            library.calls.triptych_pack_plain(self.kind, values.data_ptr(), outputs, inputs, data)
        self._bias = None
        if bias_O is not None:
            self._bias = torch.zeros(self.padded_outputs)
            self._bias[:outputs] = bias_O
        bias = None if self._bias is None else self._bias.data_ptr()
        self._of_c = Weight(self.kind, outputs, inputs, data, bias)
        self.address = ctypes.addressof(self._of_c)

    @property
    def padded_outputs(self) -> int:
        """Outputs rounded up to whole vectors, as products write them."""
        return -(-self.shape[0] // VECTOR) * VECTOR

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, with its bias."""
        return self._size + (0 if self._bias is None else self._bias.nbytes)


class CompiledProgram:
    """A list of instructions, ready to run; its buffers grow with the longest step."""

    def __init__(
        self,
        library: Library,
        instructions: Sequence[Instruction],
        buffers: Sequence[Buffer],
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        cache_dtype = cache_dtype or library.cache_dtype
        if cache_dtype not in library.caches:
            raise ValueError(f"a cache of {cache_dtype} is not served")
        list_of_c = (Instruction * len(instructions))(*instructions)
        buffers_of_c = (Buffer * max(1, len(buffers)))(*buffers)
        self._calls = library.calls
        self._length = len(instructions)
        self._address: int = self._calls.triptych_program(
            ctypes.addressof(list_of_c),
            len(instructions),
            ctypes.addressof(buffers_of_c),
            len(buffers),
            CACHES[cache_dtype],
        )
        finalize(self, library.calls.triptych_program_free, self._address)

    def run(self, pool: Pool, step: StepOfC) -> None:
        """Runs it. Raises MemoryError where its buffers cannot grow to the step, ValueError for a shape not served."""
        status = self._calls.triptych_run(self._address, pool.address, ctypes.addressof(step))
        if status == _NO_MEMORY:
            raise MemoryError(f"buffers for a step of {step.tokens} tokens")
        if status:
            raise ValueError(f"a program that is too long, or heads of {step.head_size}")

    def profile(self, on: bool) -> None:
        """Takes the times of instructions from now on, or no more."""
        self._calls.triptych_profile(self._address, int(on))

    def times(self) -> list[float]:
        """Seconds of each instruction since `profile`."""
        seconds = (ctypes.c_double * self._length)()
        self._calls.triptych_times(self._address, ctypes.addressof(seconds))
        return list(seconds)


def kv_width(cache_dtype: torch.dtype, head_dim: int) -> int:
    """Numbers that the cache takes per token and head."""
    return head_dim + _SCALE if cache_dtype is torch.int8 else head_dim


class Library:
    """One build, loaded."""

    def __init__(self, path: Path, level: str) -> None:
        self.path = path
        self.level = level
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path} cannot be loaded: {error}") from error
        functions = {name: loaded[name] for name in _SIGNATURES}
        for name, (result, arguments) in _SIGNATURES.items():
            functions[name].restype, functions[name].argtypes = result, arguments
        self.calls = SimpleNamespace(**functions)
        self.width: int = self.calls.triptych_width()
        short: int = self.calls.triptych_cache()
        self.cache_dtype = next(dtype for dtype, kind in CACHES.items() if kind == short)
        """Of keys and values, where nobody asks for another one."""
        self.caches = frozenset(CACHES) - ({torch.bfloat16} - {self.cache_dtype})

    def inputs_of(self, kind: Kind) -> Inputs:
        """What a product with a weight of this kind reads."""
        return Inputs(self.calls.triptych_inputs(kind))

    def serves(self, head_dim: int) -> bool:
        """Whether attention does heads of this size."""
        return bool(self.calls.triptych_serves(head_dim))

    def row_items(self, outputs: int) -> int:
        """Parts into which a product of so many outputs cuts a row."""
        return int(self.calls.triptych_row_items(outputs))

    def kind_of(self, weight: torch.Tensor | Blocks, *, plain: bool = False) -> Kind:
        """How a weight is stored. Raises ValueError for a type that is not served."""
        if isinstance(weight, Blocks):
            return Kind.Q4 if weight.bits == 4 else Kind.Q8
        if weight.dtype not in KINDS:
            raise ValueError(f"weights of {weight.dtype} are not served")
        kind = KINDS[weight.dtype]
        return kind if plain else Kind(self.calls.triptych_kept_as(kind, weight.shape[1]))


def _threads() -> set[int]:
    """The threads of this process, by the system's numbers."""
    return {int(name) for name in os.listdir("/proc/self/task")}


@cache
def load(isa: str = "auto") -> Library:
    """The library for this machine, built where it has to be. Raises Unavailable."""
    return Library(*find(isa))


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "triptych_width": (c_int, ()),
    "triptych_inputs": (c_int, (c_int,)),
    "triptych_kept_as": (c_int, (c_int, c_int64)),
    "triptych_serves": (c_int, (c_int,)),
    "triptych_cache": (c_int, ()),
    "triptych_row_items": (c_int64, (c_int64,)),
    "triptych_pool": (c_void_p, (c_int, c_int)),
    "triptych_pool_free": (None, (c_void_p,)),
    "triptych_spent": (c_void_p, (c_void_p,)),
    "triptych_pages": (c_void_p, (c_int64,)),
    "triptych_pages_free": (None, (c_void_p,)),
    "triptych_packed_bytes": (c_int64, (c_int, c_int64, c_int64)),
    "triptych_pack_plain": (None, (c_int, c_void_p, c_int64, c_int64, c_void_p)),
    "triptych_pack_groups": (None, (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "triptych_program": (c_void_p, (c_void_p, c_int, c_void_p, c_int, c_int)),
    "triptych_program_free": (None, (c_void_p,)),
    "triptych_run": (c_int, (c_void_p, c_void_p, c_void_p)),
    "triptych_profile": (None, (c_void_p, c_int)),
    "triptych_times": (None, (c_void_p, c_void_p)),
    "triptych_product": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p)),
    "triptych_largest": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "triptych_top": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
    "triptych_draw": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
    "triptych_weigh": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p)),
}
