"""The memory sum, and what loading a model takes."""

from __future__ import annotations

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


def test_weights_and_the_largest_step_take_what_is_planned(demo_gguf: Path) -> None:
    """Weights on huge pages of their own would take three times as much; a step is planned by one layer of 30."""
    give_back()
    before = resident_bytes()
    model, _ = load_model(str(demo_gguf), ops="native", native=NativeOptions(threads=2))
    give_back()
    assert 0.9 * model.weight_bytes < resident_bytes() - before < 1.6 * model.weight_bytes
    shape = CacheShape(num_blocks=1, block_size=16, max_num_seqs=16, max_model_len=256, max_num_batched_tokens=256)
    planned, taken = (peak_bytes(partial(trial_step, which, shape, 64)) for which in (model.one_layer(), model))
    assert taken == pytest.approx(planned, abs=8 << 20)
