"""The knobs of the gateway and of the REST process: names, ranges, and what a wrong one is answered."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from services.common.settings import SettingsError, nearest
from services.gateway.config import GatewaySettings, RestSettings
from services.gateway.parsers.formats import TAGS, TOOL_FORMATS


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[gateway]\nhttp_port = 1\ngrpc_port = 2\nengine = "unix:/a"\n[rest]\nhttp_port = 9\n')
    environ = {"TRIPTYCH_CONFIG": str(file), "TRIPTYCH_GATEWAY_GRPC_PORT": "3", "TRIPTYCH_GATEWAY_HTTP_PORT": "4"}
    settings = GatewaySettings.load(["--http-port", "5"], "gateway", environ)
    assert (settings.http_port, settings.grpc_port, settings.engine) == (5, 3, "unix:/a")
    assert RestSettings.load([], "rest", {"TRIPTYCH_CONFIG": str(file)}).http_port == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--htpp-port", "1"], "--http-port"),
        (["--http-port", "x"], "--http-port"),
        (["--http-port", "70000"], "--http-port"),
        (["--drain-s", "-1"], "--drain-s"),
        (["--log-style", "xml"], "log-style"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        GatewaySettings.load(arguments, "gateway", {})


def test_a_variable_that_no_knob_has_is_an_error() -> None:
    with pytest.raises(SettingsError, match="TRIPTYCH_REST_GATEWAY"):
        RestSettings.load([], "rest", {"TRIPTYCH_REST_GATEWEY": "x"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"gateway = 1", "gateway"),
        (b"[gateway]\nhttp_port = true", "http_port"),
        (b"[gateway]\ndrain_s = inf", "--drain-s"),
        (b"\xff\xfe", "t.toml"),
        (b"[gateway", "t.toml"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "t.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=words):
        GatewaySettings.load(["--config", str(file)], "gateway", {})


def test_a_name_of_megabytes_is_compared_with_nothing() -> None:
    assert nearest("promt", ["prompt"])
    assert nearest("prompt" * 1_000_000, ["prompt"]) == ""


def test_the_rest_process_takes_no_body_that_grpc_cannot_carry() -> None:
    with pytest.raises(SettingsError):
        RestSettings.load(["--max-body-bytes", str(8 * 1024 * 1024)], "rest", {})


def test_parsers_have_the_names_of_the_formats() -> None:
    fields = GatewaySettings.model_fields
    assert set(get_args(fields["tool_parser"].annotation)) == {"auto", "none", *TOOL_FORMATS}
    assert set(get_args(fields["reasoning_parser"].annotation)) == {"auto", "none", *TAGS}
