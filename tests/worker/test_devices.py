"""The device: whether it is there, its memory, and the way of weights to it. A GPU's counts are a fake's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.dispatch import choose_ops
from kernels.linear.blocks import Blocks
from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.settings import SettingsError
from services.worker import loading, weights
from services.worker.__main__ import main
from services.worker.config import WorkerSettings
from services.worker.devices import GpuMemory, HostMemory, find, memory_of
from services.worker.loading import load_model
from services.worker.runner import TorchRunner
from services.worker.upload import Piece, Upload
from tests.worker import tiny
from tests.worker.flat import Sequences
from tests.worker.test_precision import Source, load
from tests.worker.tiny_llama import tiny_llama

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_a_name_of_no_device_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="device must be cpu, cuda or cuda:N") as caught:
        find(name)
    assert caught.value.field == "device"
    with pytest.raises(SettingsError, match="--device"):
        WorkerSettings.build(device=name)


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there_is_an_error_that_names_the_setting(name: str, tmp_path: Path) -> None:
    folder = str(tiny.save(tiny.make("mistral"), tmp_path))
    for wish in (
        lambda: find(name),
        lambda: load_model(folder, device=name),
        lambda: TorchRunner(WorkerSettings.build(device=name)),
    ):
        with pytest.raises(FailedPrecondition, match=f"device {name}( is not there|: torch)") as caught:
            wish()
        assert caught.value.field == "device"


@no_gpu
async def test_a_worker_without_its_device_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert await main(["--device", "cuda", "--metrics-port", "0"]) == 2
    assert "triptych worker: device cuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wish",
    [
        {"quantize": "fp8"},
        {"quantize": "int4"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_what_ops_lack_is_refused_by_the_setting_and_with_the_reason_why_others_are_not_there(
    wish: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tiny_llama(tmp_path / "model"))
    without = replace(choose_ops("torch"), note="products of fp8 need a better GPU")
    monkeypatch.setattr(loading, "choose_ops", lambda *names, **given: without)
    ((name, value),) = wish.items()
    kernels = "(native or triton|triton|native)"
    needs = rf"{name} {value} needs the {kernels} kernels: torch ones do not have it \(products of fp8 need"
    with pytest.raises(InvalidArgument, match=needs) as caught:
        load_model(folder, **wish)  # type: ignore[arg-type]
    assert caught.value.field == name


def test_the_host_is_there() -> None:
    memory = memory_of(find("cpu"))
    assert isinstance(memory, HostMemory)
    assert memory.free() > 0
    assert 0 <= memory.beside(0) - memory.beside(1 << 20) <= 64 << 20


@dataclass
class Counts:
    """What torch.cuda says of a GPU of 1000 bytes."""

    beside: int = 100
    tensors: int = 300
    kept: int = 40  # by torch, of tensors that are gone
    most: int = 0
    calls: list[str] = field(default_factory=list)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == torch.device("cuda", 1)
        return 1000 - self.beside - self.tensors - self.kept, 1000

    def memory_reserved(self, device: torch.device) -> int:
        return self.tensors + self.kept

    def memory_allocated(self, device: torch.device) -> int:
        return self.tensors

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.most

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = self.tensors

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("wait")

    def empty_cache(self) -> None:
        self.calls.append("free")
        self.kept = 0

    def work(self) -> None:
        self.most = self.tensors + 250
        self.kept += 250
        self.beside += 30


def test_the_memory_of_a_gpu() -> None:
    counts = Counts()
    memory = GpuMemory(torch.device("cuda", 1), counts)
    assert memory.free() == 560 + 40
    assert memory.beside(300) == 100
    assert memory.peak(counts.work) == 250 + 30
    assert counts.calls == ["wait", "free", "wait"]
    memory.give_back()
    assert (counts.kept, memory.free()) == (0, 570)
    assert memory.peak(lambda: None) == 0


class Mark:
    """An event, and how often somebody waited for it."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def pieces() -> list[Piece]:
    return []


def through(pieces: list[Piece], size: int) -> Any:
    """An upload to the CPU through pieces of NaN bytes, which are kept in the list."""

    def make(size: int) -> Piece:
        pieces.append(Piece(torch.full((size,), 255, dtype=torch.uint8), Mark()))
        return pieces[-1]

    return lambda device: Upload(device, size, make)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 9), (100,), (64, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pieces_carry_every_byte(pieces: list[Piece], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    copied = through(pieces, 100)(CPU)(tensor)
    assert copied.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert torch.equal(copied, tensor)
    moved = -(-tensor.nbytes // 100)
    marks: list[Any] = [piece.read for piece in pieces]
    assert [mark.recorded for mark in marks] == ([-(-moved // 2), moved // 2] if moved else [])
    assert all(mark.waited == mark.recorded for mark in marks)  # a piece is not written before it was read


def test_what_lies_in_another_order_is_copied_in_its_own(pieces: list[Piece]) -> None:
    tensor = torch.arange(60.0).view(6, 10).T[1:]
    assert torch.equal(through(pieces, 16)(CPU)(tensor), tensor)


def test_a_model_that_comes_through_pieces_is_the_model(
    pieces: list[Piece], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "Upload", through(pieces, 1000))
    oracle, ids = tiny.make("qwen2"), list(range(20))
    model, _ = load_model(str(tiny.save(oracle, tmp_path)), ops="torch")
    run = Sequences(model, [ids])
    run.step([(0, len(ids))])
    torch.testing.assert_close(run.all_logits(0), tiny.oracle_logits(oracle, ids), atol=1e-4, rtol=0)
    assert pieces


def test_blocks_come_through_pieces_too(pieces: list[Piece], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "Upload", through(pieces, 50))
    down = Blocks.of(torch.randn(64, 96), 4)
    source = Source(down=down)
    layer, memory = load(source).layers[0], load(source).memory
    assert layer.down[0] is not down
    assert torch.equal(layer.down[0].dequantize(), down.dequantize())
    assert memory["int4"] == down.nbytes
