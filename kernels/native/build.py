"""Builds the C++ kernels for this machine, once: `python -m kernels.native.build`.

A build is a file named after its instruction set, its sources with their flags, and its compiler:

    avx2-5f0c1b2a-91d3e0aa.so

It lies in the cache folder (`native` in $TRIPTYCH_CACHE, or in triptych below $XDG_CACHE_HOME or ~/.cache), or in
`built` beside the sources where an image or a package brings it. Where there is no compiler, one made elsewhere of
the same sources will do.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
SHIPPED = Path(__file__).resolve().parent / "built"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
TIMEOUT_S = 600.0


class Unavailable(Exception):
    """There are no native kernels here; the message says why, for a person."""


@dataclass(slots=True, frozen=True)
class Level:
    """One instruction set: what /proc/cpuinfo must list for it, and what the compiler is told."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mtune=haswell")
_AVX512 = (*_AVX2[:-1], "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512cd", "-mtune=skylake-avx512")
_NEEDS_AVX2 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2"))
_NEEDS_AVX512 = _NEEDS_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_PORTABLE = Level("portable", frozenset(), ("-O2",))  # -O3 compiles longer, and is no faster
X86 = (
    Level(
        "amx",
        _NEEDS_AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
        (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    Level("avx512-vnni", _NEEDS_AVX512 | {"avx512_vnni"}, (*_AVX512, "-mavx512vnni")),
    Level("avx512", _NEEDS_AVX512, _AVX512),
    Level("avx2", _NEEDS_AVX2, _AVX2),
    _PORTABLE,
)
"""The best first."""
CHOICES = ("auto", *(level.name for level in X86))


def levels(cpuinfo: str | None = None) -> tuple[Level, ...]:
    """What this machine can run, the best first. `cpuinfo` stands for /proc/cpuinfo."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return (_PORTABLE,)
    here = cpuinfo is None
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    has: set[str] = set()
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            has = set(line.partition(":")[2].split())
            break
    if here and "amx_tile" in has and not _ask_for_tiles():
        has.remove("amx_tile")
    return tuple(level for level in X86 if level.needs <= has)


def _ask_for_tiles() -> bool:
    """Asks the system to let this process use the matrix unit, whose registers are off until then."""
    arch_prctl, request, tiles = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tiles) == 0)


def cache_folder() -> Path:
    """Where builds are kept: beside what else the project caches."""
    whole, base = os.environ.get("TRIPTYCH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if whole:
        return Path(whole) / "native"
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "native"


def find(isa: str = "auto", folder: Path | None = None) -> tuple[Path, str]:
    """The library and the name of its level, built where it has to be. Raises Unavailable.

    `isa` is one of CHOICES: "auto" is the best that runs here, and a level that does not build gives way to the next.
    """
    if isa not in CHOICES:
        raise ValueError(f"isa must be one of {', '.join(CHOICES)}, not {isa!r}")
    possible = [level for level in levels() if isa in ("auto", level.name)]
    if not possible:
        raise Unavailable(f"this CPU does not have {isa}; it has {', '.join(level.name for level in levels())}")
    why: Unavailable | None = None
    for level in possible:
        try:
            return build(level, folder or cache_folder()), level.name
        except Unavailable as error:
            why = why or error
    assert why is not None
    raise why


def build(level: Level, folder: Path) -> Path:
    """The library of a level: shipped, kept in the folder, or compiled into it. Raises Unavailable."""
    stem = f"{level.name}-{_digest(_texts(), *FLAGS, *level.flags)}"
    shipped = sorted(SHIPPED.glob(f"{stem}-*.so"))
    if shipped:
        return shipped[0]
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        kept = sorted(folder.glob(f"{stem}-*.so"))
        if kept:
            return kept[0]
        raise Unavailable(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    path = folder / f"{stem}-{_digest(_version(compiler))}.so"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{stem}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here, and finds it built
                if not path.exists():
                    _compile(compiler, level, path)
        except OSError as error:
            raise Unavailable(f"the native kernels cannot be kept in {folder}: {error}") from error
    return path


def _compile(compiler: str, level: Level, path: Path) -> None:
    """Into a file of its own first: nobody ever opens half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        made = Path(work) / path.name
        command = [compiler, *FLAGS, *level.flags, str(SOURCES / "program.cpp"), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{compiler} took more than {TIMEOUT_S:.0f} s for {level.name}") from error
        if done.returncode:
            told = "\n".join(done.stderr.strip().splitlines()[:5])
            raise Unavailable(f"{compiler} cannot build the native kernels for {level.name}: {told}")
        os.replace(made, path)


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} does not say its version: {error}") from error


def _texts() -> str:
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
    return "".join(f"{path.name}\n{path.read_text()}\n" for path in files)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def main(argv: Sequence[str]) -> int:
    """Builds for this machine, or for all that a package may meet; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.native.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every level that the compiler knows, for an image")
    parser.add_argument("--ship", action="store_true", help="beside the sources, and not into the cache folder")
    parser.add_argument("--isa", choices=CHOICES, default="auto", help="instruction set")
    options = parser.parse_args(argv)
    folder = SHIPPED if options.ship else cache_folder()
    try:
        if options.all:
            everywhere = X86 if platform.machine() in ("x86_64", "AMD64") else (_PORTABLE,)
            for level in everywhere:
                print(build(level, folder))
        else:
            print(find(options.isa, folder)[0])
    except Unavailable as error:
        print(f"no native kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
