"""Fixtures of all tests in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreted.memory import DTYPES


@pytest.fixture(autouse=True)
def memory_is_nan():
    """Torch fills what is not initialized with NaN, and each test draws the same numbers."""
    torch.manual_seed(11)
    torch._C._set_deterministic_algorithms(True)  # the public name imports the compiler, for 2 seconds
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request):
    return request.param
