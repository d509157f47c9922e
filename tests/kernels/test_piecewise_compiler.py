"""Pieces through torch's compiler: what it makes, what is kept of it, and what happens where there is no compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpp_builder

from kernels.dispatch import choose_ops
from kernels.linear.blocks import Blocks
from kernels.ops import Ops, Step
from kernels.piecewise import lowering
from kernels.piecewise.cache import Entry, environment
from kernels.piecewise.compiler import Compiler, _why
from kernels.piecewise.lowering import OPTIONS
from kernels.piecewise.ops import piecewise_ops
from kernels.piecewise.pieces import Piece
from kernels.piecewise.running import MOST_TOKENS
from tests.kernels.test_piecewise import FEED, HIDDEN, VOCAB, given, random

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of what its own compiler imports
FAST = {**OPTIONS, "cpp.simdlen": 1}
"""Code without vectors, which is compiled in half the time."""
CPU = torch.device("cpu")


class Twice:
    """A product that nobody looks into."""

    def __init__(self, weight_OI: torch.Tensor | Blocks, bias_O: torch.Tensor | None) -> None:
        assert isinstance(weight_OI, torch.Tensor)
        assert bias_O is None
        self._weight_OI = weight_OI

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return 2 * x_TI @ self._weight_OI.T


def opaque() -> Ops[torch.Tensor]:
    return replace(choose_ops("reference"), prepare_linear=Twice)


def one_kernel(ops: Ops[Any]) -> Callable[[Step[Any]], Any]:
    """Ids, a lookup and a norm, which become one, and a product."""
    table = ops.prepare_embedding(random(VOCAB, HIDDEN), None)
    product = ops.prepare_linear(random(FEED, HIDDEN), None)
    norm = random(HIDDEN)
    return lambda step: product(ops.rms_norm(ops.embedding(step.ids_T, table), norm, 1e-5))


def run(compiler: Compiler | None, tokens: tuple[int, ...] = (1, 2, 100)) -> list[torch.Tensor]:
    """What the model gives for so many tokens."""
    base = opaque()
    ops = base if compiler is None else piecewise_ops(base, None, compiler)
    made = ops.compile(one_kernel(ops))
    return [made(given(count)) for count in tokens]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """Where a start without anything kept what it compiled, and what its model gave."""
    folder = tmp_path_factory.mktemp("pieces")
    compiler = Compiler(CPU, folder, pytest.fail, FAST)
    made = run(compiler)
    assert (compiler.counts.compiled, compiler.counts.found) == (1, 0)
    return folder, made


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever traces, or starts a C++ compiler, fails."""
    monkeypatch.setattr(lowering, "trace", pytest.fail)
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", pytest.fail)


def entry(folder: Path) -> Path:
    (found,) = folder.glob("*/*")
    return found


def test_compiled_pieces_give_what_the_table_gives_for_one_token_and_for_many(
    kept: tuple[Path, list[torch.Tensor]],
) -> None:
    close(kept[1], run(None))


def test_a_second_start_compiles_and_traces_nothing(
    kept: tuple[Path, list[torch.Tensor]], nothing_compiles: None
) -> None:
    compiler = Compiler(CPU, kept[0], pytest.fail, FAST)
    found = run(compiler)
    assert (compiler.counts.compiled, compiler.counts.found) == (0, 1)
    assert all(map(torch.equal, found, kept[1]))


def test_a_step_larger_than_pieces_are_compiled_for_runs_uncompiled(
    kept: tuple[Path, list[torch.Tensor]], nothing_compiles: None
) -> None:
    compiler = Compiler(CPU, kept[0], pytest.fail, FAST)
    close(run(compiler, (MOST_TOKENS, MOST_TOKENS + 1)), run(None, (MOST_TOKENS, MOST_TOKENS + 1)))


def test_what_a_piece_says_is_kept_beside_it(kept: tuple[Path, list[torch.Tensor]]) -> None:
    text = (entry(kept[0]) / "piece.txt").read_text()
    assert text.startswith(
        "a0: int64 [T]\n"
        "v0 = embedding(a0, float32 [37, 24])\n"
        "v1 = rms_norm(v0, float32 [24], 1e-05)\n"
        "v2 = opaque(v1, int64 [], 20)\n"
        "return v2\n"
    )
    assert f"torch {torch.__version__}" in text


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("artifact", lambda path: path.write_bytes(path.read_bytes()[:-1]), "artifact is not as it was written"),
        ("piece.txt", lambda path: path.write_text("another\n"), "another piece or another environment"),
        ("sums", lambda path: path.write_text(""), "no sums"),
        ("sums", lambda path: path.unlink(), "FileNotFoundError"),
    ],
)
def test_an_entry_that_is_not_whole_is_made_again_with_a_warning(
    kept: tuple[Path, list[torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Path], object],
    why: str,
) -> None:
    shutil.copytree(kept[0], tmp_path, dirs_exist_ok=True)
    change(entry(tmp_path) / name)

    def again(piece: Piece, device: torch.device, target: Path, libraries: Path, options: Any) -> Any:
        target.write_text("compiled")
        return lowering.as_function(piece)

    monkeypatch.setattr("kernels.piecewise.compiler.compile_piece", again)
    warnings: list[str] = []
    compiler = Compiler(CPU, tmp_path, warnings.append, FAST)
    close(run(compiler), kept[1])
    assert len(warnings) == 1
    assert why in warnings[0]
    assert compiler.counts.compiled == 1
    assert (entry(tmp_path) / "artifact").read_text() == "compiled"
    assert entry(tmp_path).parent.name == entry(kept[0]).parent.name


def test_without_a_compiler_a_model_runs_as_it_does_without_pieces(tmp_path: Path) -> None:
    warnings: list[str] = []
    compiler = Compiler(CPU, tmp_path, warnings.append, {**FAST, "cpp.cxx": ("/nowhere/g++",)})
    assert all(map(torch.equal, run(compiler), run(None)))
    assert all(map(torch.equal, run(compiler), run(None)))  # nor is it tried again
    assert len(warnings) == 1
    assert warnings[0].startswith("the compiler failed, and the model runs without it: ")
    assert not list(tmp_path.glob("*/*"))


def test_what_a_compiler_says_is_in_the_warning() -> None:
    said = RuntimeError(
        "C++ compile error\n\nCommand:\ng++\n\nOutput:\nld: final link failed: No space left\ncollect2: error: 1\n"
    )
    assert _why(said) == "C++ compile error: ld: final link failed: No space left"
    assert _why(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    assert _why(AssertionError()) == "AssertionError"


def make_read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As far as anybody asks: a mode of the folder would not stop root."""
    asked = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: folder not in (Path(path), *Path(path).parents) and asked(path, mode)
    )


def test_a_folder_that_can_only_be_read_is_read(
    kept: tuple[Path, list[torch.Tensor]], nothing_compiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_read_only(monkeypatch, kept[0])
    read: list[Path] = []
    load = lowering.load_piece
    monkeypatch.setattr(
        "kernels.piecewise.compiler.load_piece",
        lambda source, at, options: (read.append(at), load(source, at, options))[1],
    )
    compiler = Compiler(CPU, kept[0], pytest.fail, FAST)
    assert all(map(torch.equal, run(compiler), kept[1]))
    assert compiler.counts.found == 1
    assert kept[0] not in read[0].parents


@pytest.mark.parametrize("where", ["a file", "read only"])
def test_what_cannot_be_kept_is_compiled_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "a file":
        (tmp_path / "folder").write_text("")
    else:
        make_read_only(monkeypatch, tmp_path / "folder")
    made: list[Path] = []

    def here(piece: Piece, device: torch.device, target: Path, libraries: Path, options: Any) -> Any:
        made.append(target)
        target.write_text("compiled")
        return lowering.as_function(piece)

    monkeypatch.setattr("kernels.piecewise.compiler.compile_piece", here)
    warnings: list[str] = []
    compiler = Compiler(CPU, tmp_path / "folder", warnings.append, FAST)
    close(run(compiler), run(None))
    assert warnings == [f"compiled pieces are not kept, since {tmp_path / 'folder'} cannot be written"]
    assert compiler.counts.compiled == 1
    assert tmp_path not in made[0].parents


@pytest.mark.parametrize("before", [False, True])
def test_another_process_may_be_faster_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """It puts its entry there just before this one is renamed; `before`: in place of a broken one."""

    def fill(entry: Entry, content: str) -> Entry:
        entry.libraries.mkdir(parents=True)
        entry.artifact.write_text(content)
        entry.seal()
        return entry

    place = Entry.of(tmp_path / "cache", "environment", "key", "text")
    if before:
        (fill(place, "broken").folder / "sums").write_text("")
    rename = Path.rename

    def later(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        shutil.rmtree(place.folder, ignore_errors=True)
        made = fill(Entry(tmp_path / "other", place.text), "other").folder.rename(place.folder)
        assert made == place.folder
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", later)
    with place.writing() as new:
        new.artifact.write_text("own")
    assert place.fault() is None
    assert place.artifact.read_text() == ("own" if before else "other")


def test_an_entry_is_whole_or_not_there(tmp_path: Path) -> None:
    place = Entry.of(tmp_path, "environment", "key", "text")
    assert place.fault() == ""
    with suppress(RuntimeError), place.writing() as new:
        new.artifact.write_text("half")
        raise RuntimeError
    assert place.fault() == ""
    assert not list(tmp_path.glob("*/*"))
    with place.writing() as new:
        new.artifact.write_text("first")
        with place.writing() as other:  # another process is faster
            other.artifact.write_text("second")
    assert place.fault() is None
    assert place.artifact.read_text() == "second"
    assert Entry.of(tmp_path, "environment", "key", "other text").fault() is not None


def test_an_environment_names_what_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {environment(CPU, OPTIONS), environment(CPU, {**OPTIONS, "cpp.simdlen": 1})}
    monkeypatch.setenv("TORCHINDUCTOR_SOMETHING", "1")
    known.add(environment(CPU, OPTIONS))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        known.add(environment(CPU, OPTIONS))
    finally:
        torch.set_num_threads(threads)
    assert len(known) == 4
