"""One copy up, and one down on a stream of its own. A GPU's streams and events are stood in for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from services.worker.device_link import Link

CPU = torch.device("cpu")


class FakeCuda:
    """Writes down what is asked of streams and events, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def Stream(self, device: torch.device) -> Any:
        cuda = self

        class Stream:
            def wait_event(self, event: Any) -> None:
                cuda.said.append(f"down waits for {event.number}")

        return Stream()

    def Event(self) -> Any:
        cuda = self
        cuda.said.append("event")

        class Event:
            number = cuda.said.count("event")

            def record(self, stream: Any = None) -> None:
                cuda.said.append(f"record {self.number} {'on the step' if stream is None else 'on down'}")

            def synchronize(self) -> None:
                cuda.said.append(f"wait for {self.number}")

        return Event()

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.said.append("begin down")
        yield
        self.said.append("end down")


def test_arrays_go_up_as_they_are() -> None:
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(5, dtype=np.int32),
        np.zeros((0, 5), np.int32),
        np.array([[1.5, -np.inf]], np.float64),
        np.arange(6, dtype=np.int32).reshape(3, 2).T,
        np.array([-(2**63), 2**63 - 1], np.int64),
    ]
    there = Link(CPU).up(arrays)
    for tensor, array in zip(there, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == there[0].data_ptr() % 16
    assert Link(CPU).up([]) == []


def test_words_come_down_behind_what_writes_them_and_are_waited_for_apart() -> None:
    cuda = FakeCuda()
    link = Link(CPU, cuda)
    words = torch.arange(4, dtype=torch.int32)
    arriving = link.down(words)
    assert [each for each in cuda.said if each != "event"] == [
        "record 1 on the step",
        "begin down",
        "down waits for 1",
        "record 2 on down",
        "end down",
    ]
    cuda.said.clear()
    assert arriving.wait().tolist() == [0, 1, 2, 3]
    assert cuda.said == ["wait for 2"]
    assert arriving.source is words
    assert arriving.words is not words


def test_a_step_without_words_is_waited_for_too() -> None:
    cuda = FakeCuda()
    arriving = Link(CPU, cuda).down(torch.empty(0, dtype=torch.int32))
    assert arriving.wait().tolist() == []
    assert cuda.said == ["event", "record 1 on the step", "wait for 1"]
    assert Link(CPU).down(torch.ones(1, dtype=torch.int32)).wait().tolist() == [1]
