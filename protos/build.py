"""Builds the Python modules of the contracts: the one place that says how.

`python -m protos.build` from anywhere. The Makefile, the package build, the Dockerfiles and the
tests all call `build`; a second call with nothing changed does nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def is_stale(root: Path = ROOT) -> bool:
    """Whether a module is missing or older than the contract behind it."""
    for source in _sources(root):
        for kind in KINDS:
            module = source.with_name(source.stem + kind)
            if not module.exists() or module.stat().st_mtime < source.stat().st_mtime:
                return True
    return False


def build(root: Path = ROOT) -> None:
    """Writes the modules beside the contracts. Needs grpcio-tools.

    Each file appears by one rename, so that a process which imports at that moment sees the old
    or the new one whole.
    """
    from grpc_tools import protoc

    target = root / "protos"
    with tempfile.TemporaryDirectory(dir=target, prefix=".build-") as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        sources = [f"protos/{source.name}" for source in _sources(root)]
        bundled = Path(protoc.__file__).parent / "_proto"
        includes = [f"-I{root}", f"-I{root / 'third_party'}", f"-I{bundled}"]
        if protoc.main(["protoc", *includes, *outputs, *sources]):
            raise RuntimeError("protoc failed; its messages stand above")
        for module in Path(folder, "protos").iterdir():
            shutil.copymode(root / "protos" / "__init__.py", module)
            os.replace(module, target / module.name)


def _sources(root: Path) -> list[Path]:
    return sorted((root / "protos").glob("*.proto"))


if __name__ == "__main__":
    if "--force" in sys.argv[1:] or is_stale():
        build()
