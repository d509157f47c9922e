"""The reader against the format's own library, and files that are damaged."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from services.worker.gguf_reader import Reader

VALUES = {
    "uint8": 200,
    "int8": -3,
    "uint16": 60_000,
    "int16": -300,
    "uint32": 4_000_000_000,
    "int32": -5,
    "uint64": 1 << 63,
    "int64": -(1 << 40),
    "float32": 0.1,
    "float64": 0.1,
    "bool": True,
    "string": "größer — 🤗",
}
ARRAYS = {
    "strings": ["", "a b", "größer"],
    "ints": [3, -4, 1 << 20],
    "floats": [0.5, -0.1],
    "bools": [True, False, True],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Every type of value, and tensors of one, two and three dimensions."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for kind, value in VALUES.items():
        writer.__getattribute__(f"add_{kind}")(f"a.{kind}", value)
    for name, values in ARRAYS.items():
        writer.add_array(f"an.{name}", values)
    floats = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    writer.add_tensor("one", floats[0])
    writer.add_tensor("three", floats.reshape(2, 3, 64).astype(np.float16))
    for kind in (Type.Q4_0, Type.Q8_0, Type.BF16):
        writer.add_tensor(kind.name, gguf.quants.quantize(floats, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_tensors_are_those_of_the_library(path):
    found, wanted = Reader(path), gguf.GGUFReader(path)
    keys = [key for key in wanted.fields if not key.startswith("GGUF.")]
    assert {key: found.value(key) for key in keys} == {key: wanted.fields[key].contents() for key in keys}
    assert found.value("an.bools") == ARRAYS["bools"]
    assert found.value("an.strings") == ARRAYS["strings"]
    assert found.value("an.other") is None
    assert list(found.tensors) == [tensor.name for tensor in wanted.tensors]
    for tensor in wanted.tensors:
        kind, data = found.tensors[tensor.name].kind, found.tensors[tensor.name].data
        assert kind == tensor.tensor_type
        np.testing.assert_array_equal(data, np.ascontiguousarray(tensor.data).view(np.uint8))


def test_a_file_that_ends_anywhere_too_early_says_so(path, tmp_path):
    whole = path.read_bytes()
    for size in range(0, len(whole) - 64, 13):  # 64: what may follow the last tensor
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"ends|begin|empty"):
            Reader(tmp_path / "cut.gguf")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def one_key(kind: int, value: bytes, key: bytes = b"k") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("version", "tensors", "keys", "rest", "why"),
    [
        (1, 0, 0, b"", "version is 1"),
        (3 << 24, 0, 0, b"", "big-endian"),
        (3, 0, 1 << 60, b"", "ends too early"),
        (3, 0, 1, text(b"\xff") + bytes(8), "utf-8"),
        (3, 0, 1, one_key(13, b""), "type 13"),
        (3, 0, 1, one_key(9, struct.pack("<IQ", 9, 1)), "elements of the type 9"),
        (3, 0, 1, one_key(9, struct.pack("<IQ", 4, 1 << 61)), "ends too early"),
        (3, 0, 1, one_key(9, struct.pack("<IQ", 8, 1 << 61)), "ends too early"),
        (3, 0, 2, one_key(0, b"\0") * 2, "the key k stands in it twice"),
        (3, 0, 1, one_key(4, bytes(4), b"general.alignment"), "general.alignment = 0"),
        (3, 1, 0, text(b"t") + struct.pack("<IQIQ", 1, 8, 999, 0), "999"),
        (3, 1, 0, text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0), "no whole blocks of Q4_0"),
        (3, 1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 1 << 32, 1 << 32, 0, 0), "before the tensor t"),
        (3, 1, 0, text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 1 << 63), "before the tensor t"),
        (3, 2, 0, (text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0)) * 2, "the tensor t stands in it twice"),
    ],
)
def test_what_is_damaged_is_refused_with_its_reason(tmp_path, version, tensors, keys, rest, why):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest)
    with pytest.raises(ValueError, match=why):
        Reader(tmp_path / "m.gguf")
