"""Worker, engine and gateway as child processes of this one, with sockets between them.

    with Cluster(model="…", worker={"threads": 1}, engine={"num_blocks": 64}) as cluster:
        cluster.http_url, cluster.grpc_address

A knob is named as in the role's settings; the role itself checks name and value. The roles speak
over unix sockets in a private folder with a short path, clients over TCP.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from services.common.settings import FILE_VARIABLE, option

ROLES = ("worker", "engine", "gateway")
"""In the order that they are started; they are stopped in the reverse order."""

CHILD = (sys.executable, "-P", "-m", "services.local.child")
"""The command that runs a module as our child; services.local.child says with which arguments.

-P: modules in the folder where a user happens to be are not ours."""

_SOCKET_ROOM = 40
_POLL_S = 0.05
_MARGIN_S = 2.0


class ClusterError(Exception):
    """The cluster cannot start or has lost a process; the message is for the user."""


class Cluster:
    """A local cluster. Not ready before `start` returns; `stop` leaves no process and no file."""

    def __init__(
        self,
        *,
        model: str | Path = "",
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        worker: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        gateway: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        ready_s: float = 120.0,
        drain_s: float = 10.0,
    ) -> None:
        """Ports of 0 mean free ones. `log` takes the children's standard error, ours by default."""
        self.host = host
        self.http_port = http_port or free_port(host)
        self.grpc_port = grpc_port or free_port(host)
        self._model = str(model)
        self._knobs: dict[str, dict[str, Any]] = {
            "worker": dict(worker or {}),
            "engine": dict(engine or {}),
            "gateway": dict(gateway or {}),
        }
        self._metrics_ports = {
            role: int(self._knobs[role].get("metrics_port") or free_port()) for role in ("worker", "engine")
        }
        self._environ = dict(environ or {})
        self._log = log
        self._ready_s = ready_s
        self._drain_s = drain_s
        self.folder = Path()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def http_url(self) -> str:
        """Where the REST API is, without a path."""
        return f"http://{_reachable(self.host)}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """Where the gRPC API is."""
        return f"{_reachable(self.host)}:{self.grpc_port}"

    def metrics_url(self, role: str) -> str:
        """Where Prometheus scrapes a role."""
        return (
            f"{self.http_url}/metrics" if role == "gateway" else f"http://127.0.0.1:{self._metrics_ports[role]}/metrics"
        )

    def pid(self, role: str) -> int:
        """Process id of a role."""
        return self._processes[role].pid

    def start(self, give_up: threading.Event | None = None) -> None:
        """Starts all roles and returns when the cluster answers. Raises ClusterError, and has then stopped."""
        for name, port in (("http_port", self.http_port), ("grpc_port", self.grpc_port)):
            if _taken(self.host, port):  # else whoever listens there would be taken for ours
                raise ClusterError(f"{option(name)}: something listens on {self.host}:{port} already")
        self.folder = _runtime_folder()
        try:
            for role in ROLES:
                self.start_role(role)
            self._wait_ready(give_up or threading.Event())
        except BaseException:
            self.stop(drain_s=0)
            raise

    def start_role(self, role: str) -> None:
        """Starts one role, for the first time or after it ended."""
        self._processes[role] = subprocess.Popen(
            [*CHILD, str(self.folder), f"services.{role}", *self._arguments(role)],
            stdin=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **self._environ},
            start_new_session=True,
        )

    def kill(self, role: str) -> None:
        """Ends one role at once, as a crash would."""
        process = self._processes[role]
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def check(self) -> None:
        """Raises ClusterError when a process has ended."""
        for role, process in self._processes.items():
            if (status := process.poll()) is not None:
                raise ClusterError(f"the {role} ended {_how(status)}; its log stands above")

    def is_ready(self) -> bool:
        """Whether the gateway says that it can serve."""
        connection = http.client.HTTPConnection(_reachable(self.host), self.http_port, timeout=2)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self, drain_s: float | None = None) -> None:
        """Ends the gateway first, so that live streams finish within `drain_s`, then engine and worker."""
        patience = self._drain_s if drain_s is None else drain_s
        try:
            for role in reversed(ROLES):
                if role in self._processes:
                    _ask_to_end(self._processes[role], patience)
        finally:
            for process in self._processes.values():
                _end(process)
            self._processes.clear()
            if self.folder != Path():
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder = Path()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_ready(self, give_up: threading.Event) -> None:
        deadline = time.monotonic() + self._ready_s
        while not self.is_ready():
            self.check()
            if give_up.is_set():
                raise ClusterError("stopped before it was ready")
            if time.monotonic() > deadline:
                raise ClusterError(f"not ready after {self._ready_s:.0f} s; the logs above say what is missing")
            time.sleep(_POLL_S)

    def _arguments(self, role: str) -> list[str]:
        worker, engine = (f"unix:{self.folder}/{name}" for name in ("worker", "engine"))
        clients = {"host": self.host, "http_port": self.http_port, "grpc_port": self.grpc_port}
        usual: dict[str, Any] = {"log_style": "text", "drain_s": self._drain_s}
        usual = {name: value for name, value in usual.items() if not self._said_elsewhere(role, name)}
        wired: dict[str, dict[str, Any]] = {
            "worker": {"listen": worker, "model": self._model},
            "engine": {"listen": engine, "worker": worker},
            "gateway": {"engine": engine, **clients},
        }
        if role != "gateway":
            usual["metrics_port"] = self._metrics_ports[role]
        given = {**usual, **self._knobs[role], **wired[role]}
        return [word for name, value in given.items() for word in _spell(name, value)]

    def _said_elsewhere(self, role: str, name: str) -> bool:
        """Whether the environment names a knob, or a settings file may: both come after the command line."""
        environ = {**os.environ, **self._environ}
        file = "config" in self._knobs[role] or FILE_VARIABLE in environ
        return file or f"TRIPTYCH_{role}_{name}".upper() in environ


def _taken(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def _spell(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [option(name) if value else "--no-" + option(name)[2:]]
    if isinstance(value, (list, tuple)):
        return [option(name), ",".join(str(item) for item in value)]
    return [f"{option(name)}={value}"]


def _runtime_folder() -> Path:
    """A folder that only this user can enter. /tmp where the usual place would make socket paths too long."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(base.encode()) < _SOCKET_ROOM and os.access(base, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="triptych-", dir=base))
    raise ClusterError("no writable folder with a short path for the sockets; set TMPDIR to one")


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "localhost", "": "127.0.0.1"}.get(host, host)


def _how(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _ask_to_end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s + _MARGIN_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Standard input closes last: while the child lives, that would ask it a second time."""
    process.kill()
    process.wait()
    if process.stdin:
        process.stdin.close()
