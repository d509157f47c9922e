"""Graphs of a worker: refused by the name of the setting, and counted in the memory that a step takes."""

from __future__ import annotations

import pytest
import torch

from services.common.errors import FailedPrecondition
from services.worker import graphs
from tests.worker.columns import SHAPE
from tests.worker.tiny_llama import runner_of, tiny_llama


def test_graphs_are_refused_by_the_name_of_the_setting_where_there_are_no_triton_kernels(tmp_path):
    path = str(tiny_llama(tmp_path / "tiny"))
    with pytest.raises(FailedPrecondition, match="--graphs full cannot be had: graphs are of Triton") as caught:
        runner_of(path, ops="reference", graphs="full")
    assert caught.value.field == "graphs"


def test_ops_without_graphs_record_none_and_take_nothing(tmp_path):
    runner = runner_of(str(tiny_llama(tmp_path / "tiny")), ops="reference")
    model, _ = runner._model_of("test")
    assert graphs.planned_bytes(model, SHAPE) == 0


def test_graphs_that_do_not_fit_are_told_by_the_name_of_the_setting(tmp_path, monkeypatch):
    """A GPU that is full, which a machine without one can only say."""
    runner = runner_of(str(tiny_llama(tmp_path / "tiny")), ops="reference")
    model, _ = runner._model_of("test")
    asked = []

    def warm(limits):
        asked.append(limits)
        if limits is not None:
            raise torch.OutOfMemoryError("tried to allocate 2 MiB")

    monkeypatch.setattr(model, "warm", warm)
    with pytest.raises(FailedPrecondition, match=r"do not fit .* or choose --graphs none: tried to all") as caught:
        runner.init_cache(SHAPE)
    assert caught.value.field == "graphs"
    assert asked[-1] is None  # what was recorded before is gone
    assert (asked[1].rows, asked[1].tokens, asked[1].context) == (4, 32, 64)
