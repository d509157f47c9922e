"""Steps as on a device through Triton's interpreter: tests/kernels/test_triton.py runs this in a process of its own."""

from __future__ import annotations

import pytest

from services.worker.device_steps import DeviceSteps
from tests.worker.sequences import assert_same, record, replay
from tests.worker.tiny_llama import runner_of, tiny_llama


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, of the NaN in a cache that is poisoned
@pytest.mark.parametrize(
    ("seed", "count"), [(2, 5), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in (0, 1))]
)
def test_random_sequences_give_what_the_host_gives(tmp_path, seed, count):
    path = str(tiny_llama(tmp_path / "tiny"))
    sent, expected = record(runner_of(path, ops="reference"), seed, count)
    runner = runner_of(path, ops="triton")
    assert isinstance(runner._steps, DeviceSteps)
    assert_same(replay(runner, sent, 2), expected, tolerance=1e-4)
