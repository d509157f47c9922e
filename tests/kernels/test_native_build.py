"""Building the native kernels: once, for this machine, or not at all with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.dispatch import choose_ops
from kernels.native import build, library
from kernels.native.build import Level, Unavailable
from kernels.native.ops import NativeOptions

TINY = 'extern "C" int triptych_width() { return 8; }\n'
SKYLAKE = "avx2 fma f16c bmi1 bmi2 avx512f avx512bw avx512vl avx512dq avx512cd"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A library that builds in a moment."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "program.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "nothing")
    return folder


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("sse2", ["portable"]),
        ("avx2 fma f16c bmi1", ["portable"]),
        ("avx2 fma f16c bmi1 bmi2", ["avx2", "portable"]),
        (SKYLAKE, ["avx512", "avx2", "portable"]),
        (f"{SKYLAKE} avx512_vnni", ["avx512-vnni", "avx512", "avx2", "portable"]),
        (
            f"{SKYLAKE} avx512_vnni avx512_bf16 amx_tile amx_bf16",
            ["amx", "avx512-vnni", "avx512", "avx2", "portable"],
        ),
    ],
)
def test_the_levels_of_a_cpu(monkeypatch, flags, names):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    assert [level.name for level in build.levels(f"processor : 0\nflags\t\t: fpu {flags}\n")] == names


def test_another_architecture_is_portable(monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert [level.name for level in build.levels("flags: avx2")] == ["portable"]


def test_a_build_is_kept_and_changes_with_its_sources(sources, tmp_path):
    first = build.build(build.X86[-1], tmp_path / "kept")
    made = first.stat().st_mtime_ns
    assert build.build(build.X86[-1], tmp_path / "kept") == first
    assert first.stat().st_mtime_ns == made
    (sources / "program.cpp").write_text(TINY + "// changed\n")
    assert build.build(build.X86[-1], tmp_path / "kept") != first
    assert sorted(path.suffix for path in (tmp_path / "kept").iterdir()) == [".lock", ".lock", ".so", ".so"]


def test_two_processes_build_once(sources, tmp_path):
    compiler = tmp_path / "g++"
    note = f'case "$*" in *program.cpp*) echo x >> {tmp_path}/calls; sleep 0.3;; esac'
    compiler.write_text(f'#!/bin/sh\n{note}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    code = (
        "from pathlib import Path; from kernels.native import build;"
        f"build.SOURCES = Path({str(sources)!r}); build.SHIPPED = Path('nothing');"
        f"build.COMPILERS = ({str(compiler)!r},);"
        f"print(build.build(build.X86[-1], Path({str(tmp_path / 'kept')!r})))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.communicate(timeout=60)[0] for process in both}
    assert len(told) == 1
    assert (tmp_path / "calls").read_text() == "x\n"


def test_without_a_compiler_what_was_built_before_will_do(sources, tmp_path, monkeypatch):
    kept = build.build(build.X86[-1], tmp_path / "kept")
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert build.build(build.X86[-1], tmp_path / "kept") == kept
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "kept")
    assert build.build(build.X86[-1], tmp_path / "elsewhere") == kept


@pytest.mark.usefixtures("no_compiler", "sources")
def test_without_a_compiler_auto_is_torch_and_says_so_unless_it_names_an_instruction_set(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    library.load.cache_clear()
    try:
        ops = choose_ops("auto", native=NativeOptions())
        assert (ops.name, ops.note) == ("torch", "there is no C++ compiler (no-such-compiler)")
        for choice, isa in (("native", "auto"), ("auto", "portable")):
            with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
                choose_ops(choice, native=NativeOptions(isa=isa))
    finally:
        library.load.cache_clear()


def test_a_build_that_fails_says_what_the_compiler_said(sources, tmp_path):
    (sources / "program.cpp").write_text("this is not C++\n")
    with pytest.raises(Unavailable, match=r"cannot build the native kernels for portable: .*program.cpp"):
        build.build(build.X86[-1], tmp_path / "kept")
    assert not list((tmp_path / "kept").glob("*.so"))


def test_a_level_that_does_not_build_gives_way_to_the_next(sources, tmp_path, monkeypatch):
    levels = (Level("best", frozenset(), ("-no-such-flag",)), build.X86[-1])
    monkeypatch.setattr(build, "levels", lambda: levels)
    assert build.find("auto", tmp_path / "kept")[1] == "portable"


def test_a_folder_that_cannot_be_written_is_a_reason(sources, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be kept in"):
        build.build(build.X86[-1], tmp_path / "file")


def test_a_level_that_the_cpu_lacks_and_one_that_does_not_exist(monkeypatch):
    monkeypatch.setattr(build, "levels", lambda: build.X86[-1:])
    with pytest.raises(Unavailable, match="does not have avx512; it has portable"):
        build.find("avx512")
    with pytest.raises(ValueError, match="avx2, portable"):
        build.find("sse9")


def test_heads_that_native_attention_does_not_do_are_torchs():
    ops = choose_ops("auto", head_dim=8)
    assert (ops.name, ops.note) == ("torch", "native attention does not do heads of 8")
    assert choose_ops("auto", kv_dtype=torch.float32, head_dim=64).kv_dtype in (torch.float32, None)


def test_the_sources_are_in_the_package():
    assert {path.suffix for path in build.SOURCES.iterdir()} == {".h", ".cpp"}
    assert os.access(Path(build.__file__).parent / "src" / "program.cpp", os.R_OK)
