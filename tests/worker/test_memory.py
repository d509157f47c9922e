"""The memory sum, and what loading a model takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.native.ops import NativeOptions
from services.worker.loading import load_model
from services.worker.memory import available_bytes, give_back, human, peak_bytes, resident_bytes


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 29, "1.50 GiB")]
)
def test_bytes_for_a_person(size: int, text: str) -> None:
    assert human(size) == text


def test_the_peak_is_seen_although_it_has_passed() -> None:
    size = 64 << 20

    def work() -> None:
        bytes(bytearray(b"\1") * size)

    assert size <= peak_bytes(work) < 4 * size


def test_something_is_available() -> None:
    assert available_bytes() > 0


def test_weights_take_what_is_counted(demo_gguf: Path) -> None:
    """Where each began on huge pages of its own it would be three times as much."""
    load_model(str(demo_gguf), ops="native", native=NativeOptions(threads=2))  # and lets go: libraries stay
    give_back()
    before = resident_bytes()
    model, _ = load_model(str(demo_gguf), ops="native", native=NativeOptions(threads=2))
    give_back()
    assert 0.9 * model.weight_bytes < resident_bytes() - before < 1.6 * model.weight_bytes
