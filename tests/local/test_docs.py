"""What the pages say can be found: links lead somewhere, commands and options exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from services.cli import __main__
from services.cli.reference import page
from services.worker.config import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "tests/*.md", "kernels/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_options_exist(path: Path) -> None:
    text = path.read_text()
    commands = set(re.findall(r"(?<!cache/)triptych ([a-z][a-z-]*)(?=[ `\n])", re.sub(r"(cd|clone) .*", "", text)))
    assert commands <= {*__main__.COMMANDS, "version", "command"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for words in re.findall(r"`make ([a-z -]+)`", text) for word in words.split()} <= targets
    known = set(re.findall(r"`(--[a-z-]+)`", page()))
    ours = {
        option for option in re.findall(r"`(--[a-z0-9-]+)`", text) if path.name in ("operations.md", "architecture.md")
    }
    assert ours <= known


def test_the_script_page_names_every_key() -> None:
    source = (ROOT / "services/worker/script.py").read_text().split('"""')[1]
    keys = set(re.findall(r"^    ([a-z_]+)(?=  )", source, re.MULTILINE))
    text = (ROOT / "docs/simulated-worker.md").read_text()
    assert {key for key in keys if f"`{key}`" not in text} == set()
    simulated = {name for name in WorkerSettings.model_fields if name.startswith("simulated_") and name.endswith("_us")}
    assert {f"`--{name.replace('_', '-')}`" in text for name in simulated} == {True}


def test_the_example_settings_are_valid() -> None:
    from services.cli.serve import ROLES

    tables = tomllib.loads((ROOT / "examples/triptych.toml").read_text())
    for role, values in tables.items():
        ROLES[role].build(**values)
