"""Launches as Triton itself binds them, with a driver that has no GPU; test_triton.py runs this by itself.

What `compile_launch` works out of a launch must be what Triton's own launcher works out of the same call.
"""

from __future__ import annotations

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels import compiled
from kernels.examples import launches
from kernels.launch import Chip
from kernels.shapes import SHAPES


class Driver:
    """Names a GPU that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def is_active(self):
        return True


class CompiledInstead(Exception):
    """What would have been compiled."""


def catch(source, target=None, options=None, **_):
    attributes = {place: each for place, each in source.attrs.items() if each}
    raise CompiledInstead(
        source.signature,
        source.constants,
        attributes,
        target.arch,
        *(options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_triton_binds_what_is_compiled(shape, monkeypatch):
    driver.set_active(Driver())
    monkeypatch.setattr(compiled.triton, "compile", catch)
    count = 0
    for name, launch in launches(shape, Chip(90, 132)):
        with pytest.raises(CompiledInstead) as ours:
            compiled.compile_launch(launch, 90)
        kernel = launch.kernel
        kernel.device_caches.clear()
        _ = kernel.device_caches[0]  # Triton looks up its compiler here
        monkeypatch.setattr(kernel, "compile", catch)
        with pytest.raises(CompiledInstead) as tritons:
            launch.kernel.warmup(*launch.given, grid=launch.grid, **launch.constants, **launch.options)
        assert ours.value.args == tritons.value.args, name
        count += 1
    assert count > 20


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_number_of_tokens_compiles_nothing_anew(shape, monkeypatch):
    """A step must not wait for a compiler because its size is no multiple of 16, or 1."""
    monkeypatch.setattr(compiled.triton, "compile", catch)
    found = []
    for tokens in (64, 33, 1):
        seen = {}
        for name, launch in launches(shape, Chip(90, 132), tokens):
            with pytest.raises(CompiledInstead) as caught:
                compiled.compile_launch(launch, 90)
            seen[name] = caught.value.args
        found.append(seen)
    for name, first in found[0].items():
        assert all(seen[name] == first for seen in found[1:]), name
