"""Builds the Python modules of the contracts: the one place that says how.

`python -m protos.build` from the root. The Makefile, the package build, the Dockerfiles and the
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
    target = root / "protos"
    with tempfile.TemporaryDirectory(dir=target, prefix=".build-") as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        _protoc(root, *outputs, *(f"protos/{source.name}" for source in _sources(root)))
        for module in Path(folder, "protos").iterdir():
            shutil.copymode(root / "protos" / "__init__.py", module)
            os.replace(module, target / module.name)


def describe(target: Path, root: Path = ROOT) -> None:
    """Writes the REST facade and all that it needs as one descriptor set, for a proxy to transcode by.

    The details of a refusal must be in it too, or the proxy answers a refusal with an empty body.
    """
    from google.rpc import error_details_pb2

    common = Path(error_details_pb2.__file__).parent.parent.parent
    details = "google/rpc/error_details.proto"
    _protoc(
        root, f"-I{common}", f"--descriptor_set_out={target}", "--include_imports", "protos/openai_rest.proto", details
    )


def _protoc(root: Path, *arguments: str) -> None:
    from grpc_tools import protoc

    bundled = Path(protoc.__file__).parent / "_proto"
    includes = [f"-I{root}", f"-I{root / 'third_party'}", f"-I{bundled}"]
    if protoc.main(["protoc", *includes, *arguments]):
        raise RuntimeError("protoc failed; its messages stand above")


def _sources(root: Path) -> list[Path]:
    return sorted((root / "protos").glob("*.proto"))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            if is_stale():
                build()
        case ["--descriptor", path]:
            describe(Path(path))
        case _:
            sys.exit("usage: python -m protos.build [--descriptor FILE]")
