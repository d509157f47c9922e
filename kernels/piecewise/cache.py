"""What was compiled, kept on disk: a folder for each environment, in it one for each distinct piece.

    <folder>/<environment>/<piece>/piece.txt      what the piece says, below it the environment
                                   artifact       what torch loads
                                   inductor/      libraries that the artifact finds by their names
                                   sums           a line for each of these files

An entry is written beside its place and renamed into it, so that it is whole or not there. One that does not have the
sums or the text that it should have is made again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SOURCES = Path(__file__).resolve().parent.parent


def default_folder() -> Path:
    """Beside what else the project caches: `pieces` in $TRIPTYCH_CACHE, or in triptych below $XDG_CACHE_HOME or
    ~/.cache."""
    whole, base = os.environ.get("TRIPTYCH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if whole:
        return Path(whole) / "pieces"
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "pieces"


def environment(device: torch.device, options: Mapping[str, Any]) -> str:
    """All that code depends on beside the piece: one fact a line."""
    if device.type == "cuda":
        import triton  # as the compiler does in any case

        facts = [
            f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {torch.version.cuda}",
            f"triton {triton.__version__}",
        ]
    else:
        facts = [f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_flags()}"]
        facts.append(f"threads {torch.get_num_threads()}")
    facts += [
        f"torch {torch.__version__} {torch.version.git_version}",
        f"python {sys.version}",
        f"compiler {os.environ.get('CXX', '')} {shutil.which('g++') or ''}",
        f"precision {torch.get_float32_matmul_precision()}",
        f"sources {_sources()}",
    ]
    facts += [f"option {name} {value!r}" for name, value in sorted(options.items())]
    facts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("TORCHINDUCTOR_")]
    return "\n".join(facts) + "\n"


def _cpu_flags() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return digest(next((line for line in lines if line.startswith("flags")), ""))


def _sources() -> str:
    """Of the references that a piece is made of, and of what makes it."""
    others = [_SOURCES / "eager.py", _SOURCES / "media" / "encoder.py"]
    files = sorted([*_SOURCES.glob("*/reference.py"), *_SOURCES.glob("piecewise/*.py"), *others])
    return digest("".join(path.read_text() for path in files))


def digest(text: str) -> str:
    """16 digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True, frozen=True)
class Entry:
    """One piece's folder."""

    folder: Path
    text: str  # the piece's, and the environment

    @staticmethod
    def of(root: Path, environment: str, key: str, text: str) -> Entry:
        """The place of a piece, whether it is there or not."""
        return Entry(root / digest(environment) / key, f"{text}\n{environment}")

    @property
    def artifact(self) -> Path:
        """What torch loads."""
        return self.folder / "artifact"

    @property
    def libraries(self) -> Path:
        """The folder that Inductor looks into."""
        return self.folder / "inductor"

    def below(self, root: Path) -> Entry:
        """The same in another folder."""
        return Entry(root / self.folder.parent.name / self.folder.name, self.text)

    def can_be_written(self) -> bool:
        """Whether the entry may be made, or made again."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return os.access(self.folder.parent, os.W_OK)

    def fault(self) -> str | None:
        """Why the entry cannot be used; empty where it is not there, None where it can."""
        if not self.folder.exists():
            return ""
        try:
            if (self.folder / "piece.txt").read_text() != self.text:
                return "it is of another piece or another environment"
            lines = (self.folder / "sums").read_text().splitlines()
            for line in lines:
                expected, name = line.split(" ", 1)
                if _sum(self.folder / name) != expected:
                    return f"{name} is not as it was written"
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None if lines else "it has no sums"

    @contextmanager
    def writing(self) -> Iterator[Entry]:
        """An entry beside this one, to be filled; then it takes this place. Raises OSError.

        An entry that is there and can be used stays: another process was faster.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=self.folder.parent) as aside:
            made = Entry(Path(aside) / "new", self.text)
            made.libraries.mkdir(parents=True)
            yield made
            made.seal()
            try:
                if self.fault():
                    self.folder.rename(Path(aside) / "old")
                if self.fault() is not None:
                    made.folder.rename(self.folder)
            except OSError:  # another process may have done either in between
                if self.fault() is not None:
                    raise

    def seal(self) -> None:
        """Writes down what the files are."""
        (self.folder / "piece.txt").write_text(self.text)
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and "locks" not in path.parts]
        sums = [f"{_sum(path)} {path.relative_to(self.folder)}\n" for path in files]
        (self.folder / "sums").write_text("".join(sums))


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
