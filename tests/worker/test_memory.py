"""The memory sum, and what loading a model takes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kernels.native.ops import NativeOptions
from services.worker.loading import load_model
from services.worker.memory import available_bytes, give_back, human, peak_bytes, resident_bytes
from services.worker.step import CacheShape
from services.worker.trial import trial_step


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


def measured(path: str) -> tuple[int, int, int, int]:
    """Bytes: of the weights; that loading them took; that the largest step is planned to take; that it takes."""
    give_back()
    before = resident_bytes()
    model, _ = load_model(path, ops="native", native=NativeOptions(threads=2))
    give_back()
    loaded = resident_bytes() - before
    shape = CacheShape(num_blocks=1, block_size=16, max_num_seqs=16, max_model_len=256, max_num_batched_tokens=256)
    planned, taken = (peak_bytes(partial(trial_step, which, shape, 64)) for which in (model.one_layer(), model))
    return model.weight_bytes, loaded, planned, taken


def test_weights_and_the_largest_step_take_what_is_planned(demo_gguf: Path) -> None:
    """Weights on huge pages of their own would take three times as much; a step is planned by one layer of 30.

    In a process of its own, as a worker is: this one holds free memory of the tests before, which hides what is taken.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        weights, loaded, planned, taken = process.submit(measured, str(demo_gguf)).result()
    assert 0.9 * weights < loaded < 1.6 * weights
    assert taken == pytest.approx(planned, abs=8 << 20)
