"""The contracts: unchanged unless meant, linted, and written as the house writes them."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.protos.describe import FILES, describe

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = Path(__file__).with_name("contracts.txt")


def test_contracts_are_as_committed() -> None:
    changes = difflib.unified_diff(GOLDEN.read_text().splitlines(), describe().splitlines(), "committed", "now", "", "")
    assert not list(changes), "a contract changed; if it is meant, run `make contracts`"


def test_every_part_of_a_contract_is_described() -> None:
    """buf's COMMENTS rules: services, calls, messages, fields, enums and their values."""
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_columns_are_raw_bytes_and_named_for_their_element(file) -> None:
    for message in file.message_types_by_name.values():
        for field in message.fields:
            is_column = re.search(r"_(i32|u32|u64|f32)le$", field.name)
            if is_column:
                assert field.type == field.TYPE_BYTES, f"{message.name}.{field.name}"


def test_the_rest_facade_has_no_optional_fields() -> None:
    """Generators of old grpc-gateways refuse files that use `optional`."""
    source = (ROOT / "protos/openai_rest.proto").read_text()
    code = re.sub(r"//.*", "", source)
    assert "optional" not in code
    assert [name for name in re.findall(r'import "(.*)"', code) if not name.startswith("google/api/")] == []


def test_stubs_are_built_once_and_only_when_stale(tmp_path: Path) -> None:
    from protos import build

    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "__init__.py").touch()
    source = tmp_path / "protos" / "small.proto"
    source.write_text('syntax = "proto3";\npackage small;\nmessage Thing { int32 size = 1; }\n')
    assert build.is_stale(tmp_path)
    build.build(tmp_path)
    assert not build.is_stale(tmp_path)
    made = {path.name for path in source.parent.iterdir()} - {"__init__.py", "small.proto"}
    assert made == {"small_pb2.py", "small_pb2.pyi", "small_pb2_grpc.py"}
