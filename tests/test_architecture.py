"""The laws of the house, read from the source; CONTRIBUTING.md says why each of them is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("gateway", "engine", "worker", "cli", "local")
FILES = sorted(
    path
    for folder in ("services", "kernels", "protos")
    for path in (ROOT / folder).rglob("*.py")
    if not re.search(r"_pb2(_grpc)?\.py$", path.name)
)
MAY_IMPORT = {
    "protos": ("protos", "grpc_tools"),
    "services.common": ("services.common",),
    "kernels": ("kernels", "torch", "triton"),
    "services.gateway": ("services.gateway", "services.common", "protos"),
    "services.engine": ("services.engine", "services.common", "protos"),
    "services.worker": ("services.worker", "services.common", "protos", "kernels"),
    "services.local": ("services.local", "services.common"),
    # The cli simulates with the engine's pure rooms: the core, and the plain data that goes in and comes out.
    "services.cli": (
        "services.cli",
        "services.local",
        "services.common",
        "protos",
        *(f"services.engine.{room}" for room in ("core", "events", "plan", "request")),
    ),
}
DOORS = {"service", "wire", "workers", "router", "rest", "cli"}
TOP_LOOPS = {
    "services.common.server",
    "services.engine.loop",
    "services.worker.stepper",
    "services.worker.threads",
    "services.gateway.rest.asgi",
    "services.gateway.media.child.__main__",
}
OURS = ("services", "protos", "kernels")
MEDIA_PROCESS = ("services.gateway.media.child",)  # a process of its own: what decodes stays out of the gateway's
DECODERS = ("numpy", "PIL", "av")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def home_of(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("services") else 1])


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, inside functions and for type checking too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            name = node.module or ""
            for alias in node.names:
                inner = ROOT.joinpath(*name.split("."), alias.name)
                generated = name == "protos" and "_pb2" in alias.name
                yield (
                    f"{name}.{alias.name}" if inner.with_suffix(".py").exists() or inner.is_dir() or generated else name
                )


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def room_files() -> Iterator[tuple[Path, str]]:
    for path in FILES:
        if path != ROOT / "services" / "__init__.py":
            yield path, module_of(path)


def test_a_part_imports_only_what_it_may() -> None:
    wrong = []
    for path, module in room_files():
        allowed = MAY_IMPORT[home_of(module)]
        named = [name for name in imports(path) if within(name, OURS) and not within(name, allowed)]
        if module.startswith("services.cli"):
            named = [name for name in named if not name.endswith(".config")]
        wrong += [f"{module} imports {name}" for name in named]
    assert not wrong


def test_heavy_libraries_stay_where_they_belong() -> None:
    wrong = []
    for path, module in room_files():
        torch_home = within(module, ("services.worker", "kernels"))
        for name in imports(path):
            if within(name, ("torch", "triton")) and not torch_home:
                wrong.append(f"{module} imports {name}")
            if within(name, ("numpy",)) and not within(module, ("services.worker", *MEDIA_PROCESS)):
                wrong.append(f"{module} imports {name}")
            if within(name, ("PIL", "av")) and not within(module, ("services.cli", *MEDIA_PROCESS)):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_protobuf_stops_at_the_doors() -> None:
    wrong = []
    for path, module in room_files():
        parts = set(module.split("."))
        if any("_pb2" in name and within(name, ("protos",)) for name in imports(path)) and not parts & DOORS:
            wrong.append(module)
    assert not wrong


@pytest.mark.parametrize("package", [f"services.{name}" for name in (*SERVICES, "common")])
def test_imports_go_strictly_down(package: str) -> None:
    folder = ROOT.joinpath(*package.split("."))
    docstring = ast.get_docstring(tree(folder / "__init__.py")) or ""
    floors = re.findall(r"^([a-z_0-9]+)/?(?:  +|$)", docstring, re.MULTILINE)
    rooms = {
        path.stem for path in folder.iterdir() if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert set(floors) == rooms - {"__init__"}, "the package's docstring lists every room, top first"
    wrong = []
    for path in FILES:
        module = module_of(path)
        if not module.startswith(package + "."):
            continue
        room = module.split(".")[2]
        for name in imports(path):
            other = name.split(".")[2] if name.startswith(package + ".") else room
            if other != room and floors.index(other) <= floors.index(room):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_files_and_functions_stay_short() -> None:
    wrong = []
    for path, module in room_files():
        length = len(path.read_text().splitlines())
        if length > 400:
            wrong.append(f"{module}: {length} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > (120 if module.startswith("kernels") else 60):
                    wrong.append(f"{module}.{node.name}: {lines} lines")
    common = sum(len(path.read_text().splitlines()) for path in (ROOT / "services/common").glob("*.py"))
    assert common <= 900
    assert not wrong


def test_nothing_is_looked_up_by_name_and_little_is_caught_whole() -> None:
    wrong = []
    for path, module in room_files():
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                if home_of(module) in ("services.gateway", "services.engine"):
                    wrong.append(f"{module}:{node.lineno}: {node.func.id}")
            elif isinstance(node, ast.ExceptHandler) and module not in TOP_LOOPS:
                kind = ast.unparse(node.type) if node.type else "everything"
                again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if kind in ("everything", "Exception", "BaseException") and not again:
                    wrong.append(f"{module}:{node.lineno}: except {kind}")
    assert not wrong


def test_public_things_say_what_they_are() -> None:
    assert not [module for path, module in room_files() if not ast.get_docstring(tree(path))]


@pytest.mark.parametrize("role", ["gateway", "engine", "cli", "local", "common"])
def test_runs_where_torch_cannot_be_imported(role: str) -> None:
    modules = [
        module
        for path, module in room_files()
        if module.startswith(f"services.{role}") and "__main__" not in module and not within(module, MEDIA_PROCESS)
    ]
    code = (
        f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}; "
        f"assert not sys.modules.keys() & {set(DECODERS)}, 'decoders'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
