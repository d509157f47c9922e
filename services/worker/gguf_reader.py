"""The layout of a GGUF file: metadata and tensors, mapped. Knows no models.

    header     "GGUF"   version u32   number of tensors u64   number of keys u64
    keys       string   type u32   value                      an array: type u32   length u64   elements
    tensors    string   dimensions u32   sizes u64 each, the innermost first   type u32   offset u64
    data       from the next multiple of general.alignment on; offsets count from here

Numbers are little-endian; a string is its length in bytes, u64, and UTF-8. Arrays are stepped over, and read when they
are asked for: those of a tokenizer are nearly all of the metadata.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values that are one number, as struct and numpy call them."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ALIGNMENT = 32


class Tensor(NamedTuple):
    """A tensor as it is stored: [rows, bytes of a row], or the bytes of its only row."""

    name: str
    kind: Type
    data: NDArray[np.uint8]


@dataclass(slots=True, frozen=True)
class _Array:
    """Where the elements of an array lie."""

    at: int
    kind: int
    length: int


class Reader:
    """One file. Raises ValueError for what is not GGUF, or not whole."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            self._read()
        except struct.error as error:
            raise ValueError("it ends too early") from error

    def value(self, key: str) -> Any:
        """A metadata value, or None: a number, a bool, a string, or a list of them."""
        value = self._values.get(key)
        if isinstance(value, _Array):
            value = self._values[key] = self._elements(value)
        return value

    def _read(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, keys = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not one of {_VERSIONS}; big-endian files are not read")
        at = 24
        for _ in range(keys):
            key, at = self._string(at)
            (kind,) = _U32.unpack_from(self._bytes, at)
            if key in self._values:
                raise ValueError(f"the key {key} stands in it twice")
            self._values[key], at = self._value(kind, at + 4)
        self._read_tensors(at, tensors)

    def _read_tensors(self, at: int, count: int) -> None:
        found: list[tuple[str, tuple[int, ...], Type, int]] = []
        for _ in range(count):
            name, at = self._string(at)
            (dimensions,) = _U32.unpack_from(self._bytes, at)
            *sizes, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self._bytes, at + 4)
            at += 4 + 8 * dimensions + 12
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"the tensor {name} has the type {kind}, which is none of GGUF's")
            found.append((name, tuple(reversed(sizes)), Type(kind), offset))
        alignment = self._values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment = {alignment!r}")
        begin = -(-at // alignment) * alignment
        whole = np.frombuffer(self._bytes, np.uint8)
        for name, shape, kind, offset in found:
            if name in self.tensors:
                raise ValueError(f"the tensor {name} stands in it twice")
            self.tensors[name] = Tensor(name, kind, _stored(whole[begin + offset :], name, shape, kind))

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        """A value and where the next one begins."""
        if kind == _STRING:
            return self._string(at)
        if kind == _ARRAY:
            element, length = struct.unpack_from("<IQ", self._bytes, at)
            return _Array(at + 12, element, length), self._end_of_elements(element, length, at + 12)
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the type {kind}")
        (number,) = struct.unpack_from("<" + _NUMBERS[kind], self._bytes, at)
        return number, at + struct.calcsize(_NUMBERS[kind])

    def _end_of_elements(self, kind: int, length: int, at: int) -> int:
        if kind == _STRING:
            read, data = _U64.unpack_from, self._bytes
            for _ in range(length):
                at += 8 + read(data, at)[0]
        elif kind in _NUMBERS:
            at += length * struct.calcsize(_NUMBERS[kind])
        else:
            raise ValueError(f"an array has elements of the type {kind}")
        if at > len(self._bytes):
            raise ValueError("it ends too early")
        return at

    def _elements(self, array: _Array) -> list[Any]:
        if array.kind != _STRING:
            numbers = np.frombuffer(self._bytes, "<" + _NUMBERS[array.kind], array.length, array.at)
            return list(numbers.tolist())
        end = self._end_of_elements(_STRING, array.length, array.at)
        data, read, at = self._bytes[array.at : end], _U64.unpack_from, 0
        strings: list[str] = []
        for _ in range(array.length):
            first = at + 8
            at = first + read(data, at)[0]
            strings.append(data[first:at].decode())
        return strings

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._bytes, at)
        end = at + 8 + length
        if end > len(self._bytes):
            raise ValueError("it ends too early")
        return self._bytes[at + 8 : end].decode(), end


def _stored(data: NDArray[np.uint8], name: str, shape: tuple[int, ...], kind: Type) -> NDArray[np.uint8]:
    """The tensor that begins with `data`."""
    block, size = GGML_QUANT_SIZES[kind]
    *outer, inner = shape or (1,)
    if inner % block:
        raise ValueError(f"a row of the tensor {name} has {inner} numbers, no whole blocks of {kind.name}")
    stored = (*outer, inner // block * size)
    count = 1
    for length in stored:
        count *= length
    if count > len(data):
        raise ValueError(f"it ends before the tensor {name} does")
    return data[:count].reshape(stored)
