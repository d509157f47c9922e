"""The memory sum without a model."""

from __future__ import annotations

import pytest

from services.worker.memory import available_bytes, human, peak_bytes


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
