"""Worker, engine and one or more gateways as child processes of this one, with sockets between them.

    with Cluster(model="…", worker={"threads": 1}, engine={"num_blocks": 64}) as cluster:
        cluster.http_url, cluster.grpc_address

A knob is named as in the role's settings; the role itself checks name and value. The roles speak
over unix sockets in a private folder with a short path, clients over TCP. Several gateways listen
on the same two ports; each is known by a private port of its own.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from services.common.settings import FILE_VARIABLE, option

CHILD = (sys.executable, "-P", "-m", "services.local.child")
"""The command that runs a module as our child; services.local.child says with which arguments.

-P: modules in the folder where a user happens to be are not ours."""

PRIVATE_PORT = 9103
"""The first of several gateways that one command serves has this private port, the second the next one."""

_SOCKET_ROOM = 40
_POLL_S = 0.05
_MARGIN_S = 2.0
_SHORT_LIFE_S = 5.0


class ClusterError(Exception):
    """The cluster cannot start or has lost a process; the message is for the user."""


class Cluster:
    """A local cluster. Not ready before `start` returns; `stop` leaves no process and no file."""

    def __init__(
        self,
        *,
        model: str | Path = "",
        gateways: int = 1,
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
        """Ports of 0 mean free ones; where several gateways have private ports, they are `private_port` and the next.

        `log` takes the children's standard error, ours by default.
        """
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
        self._shares = gateways > 1
        name = self._knobs["gateway"].get("name", "gateway")
        self._names = {f"gateway-{i}": f"{name}-{i}" for i in range(gateways)} if self._shares else {"gateway": name}
        self._private_ports = self._choose_private_ports()
        self._environ = dict(environ or {})
        self._log = log
        self._ready_s = ready_s
        self._drain_s = drain_s
        self.folder = Path()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}
        self._reserved: list[socket.socket] = []

    def _choose_private_ports(self) -> dict[str, int]:
        asked = self._knobs["gateway"].get("private_port")
        if asked is None and not self._shares:
            return {}
        return {role: int(asked) + i if asked else free_port() for i, role in enumerate(self._names)}

    @property
    def roles(self) -> tuple[str, ...]:
        """The processes in the order that they are started; they are stopped in the reverse order."""
        return ("worker", "engine", *self._names)

    @property
    def http_url(self) -> str:
        """Where the REST API is, without a path."""
        return f"http://{_reachable(self.host)}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """Where the gRPC API is."""
        return f"{_reachable(self.host)}:{self.grpc_port}"

    @property
    def private_addresses(self) -> dict[str, str]:
        """host:port of each gateway's private port, by the gateway's name."""
        return {self._names[role]: f"{self._private_host}:{port}" for role, port in self._private_ports.items()}

    @property
    def _private_host(self) -> str:
        return _reachable(self._knobs["gateway"].get("private_host", "127.0.0.1"))

    def metrics_url(self, role: str) -> str:
        """Where Prometheus scrapes a role."""
        if role in self._metrics_ports:
            return f"http://127.0.0.1:{self._metrics_ports[role]}/metrics"
        private = self._private_ports.get(role)
        return f"{self.http_url}/metrics" if private is None else f"http://{self._private_host}:{private}/metrics"

    def pid(self, role: str) -> int:
        """Process id of a role."""
        return self._processes[role].pid

    def start(self, give_up: threading.Event | None = None) -> None:
        """Starts all roles and returns when the cluster answers. Raises ClusterError, and has then stopped."""
        try:
            self._take_ports()
            self.folder = _runtime_folder()
            for role in self.roles:
                self.start_role(role)
            self._wait_ready(give_up or threading.Event())
        except BaseException:
            self.stop(drain_s=0)
            raise

    def _take_ports(self) -> None:
        """Raises where somebody listens, who would be taken for ours; keeps ports that several of ours share."""
        named = {"http_port": self.http_port, "grpc_port": self.grpc_port}
        for name, port in named.items():
            if _taken(self.host, port):
                raise ClusterError(f"{option(name)}: something listens on {self.host}:{port} already")
            if self._shares:
                self._reserved.append(_reserve(self.host, port))
        for port in self._private_ports.values():
            if _taken(self._private_host, port):
                raise ClusterError(f"--private-port: something listens on {self._private_host}:{port} already")

    def start_worker(self) -> str:
        """Starts the worker alone, and says where it will listen; `stop` ends it."""
        self.folder = _runtime_folder()
        self.start_role("worker")
        return f"unix:{self.folder}/worker"

    def runs(self, role: str) -> bool:
        """Whether a role that was started has not ended."""
        return self._processes[role].poll() is None

    def start_role(self, role: str) -> None:
        """Starts one role, for the first time or after it ended."""
        self._started[role] = time.monotonic()
        self._processes[role] = subprocess.Popen(
            [*CHILD, str(self.folder), f"services.{_module(role)}", *self._arguments(role)],
            stdin=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **self._environ},
            start_new_session=True,
        )

    def kill(self, role: str) -> None:
        """Ends one role at once, as a crash would."""
        _end(self._processes[role])

    def check(self) -> None:
        """Raises ClusterError when a process has ended."""
        for role, process in self._processes.items():
            if (status := process.poll()) is not None:
                raise ClusterError(f"the {role} ended {_how(status)}; its log stands above")

    def mend(self) -> list[str]:
        """Starts a role again that has ended, and says so: the others hold what its requests need to go on.

        One that ended right after its start would do so again: then this raises as `check` does.
        """
        said = []
        for role in self.roles:
            status = self._processes[role].poll()
            if status is not None and time.monotonic() - self._started[role] > _SHORT_LIFE_S:
                _end(self._processes[role])
                self.start_role(role)
                said.append(f"the {role} ended {_how(status)} and is started again")
        self.check()
        return said

    def is_ready(self) -> bool:
        """Whether every gateway says that it can serve."""
        private = [(self._private_host, port) for port in self._private_ports.values()]
        return all(
            answers(*address, "/health/ready") for address in private or [(_reachable(self.host), self.http_port)]
        )

    def stop(self, drain_s: float | None = None) -> None:
        """Ends the gateways first, so that live streams finish within `drain_s`, then engine and worker."""
        patience = self._drain_s if drain_s is None else drain_s
        try:
            for roles in (tuple(self._names), ("engine",), ("worker",)):
                _ask_to_end([self._processes[role] for role in roles if role in self._processes], patience)
        finally:
            for process in self._processes.values():
                _end(process)
            self._processes.clear()
            for reserved in self._reserved:
                reserved.close()
            self._reserved.clear()
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
        module = _module(role)
        usual: dict[str, Any] = {"log_style": "text", "drain_s": self._drain_s}
        usual = {name: value for name, value in usual.items() if not self._said_elsewhere(module, name)}
        wired: dict[str, dict[str, Any]] = {
            "worker": {"listen": worker, "model": self._model, "keep_trying": False},
            "engine": {"listen": engine, "worker": worker},
            "gateway": {"engine": engine, **clients, "reuse_port": self._shares},
        }
        own: dict[str, Any] = {}
        if module != "gateway":
            usual["metrics_port"] = self._metrics_ports[module]
        elif role in self._private_ports:
            own = {"name": self._names[role], "private_port": self._private_ports[role]}
        given = {**usual, **self._knobs[module], **wired[module], **own}
        return [word for name, value in given.items() for word in _spell(name, value)]

    def _said_elsewhere(self, module: str, name: str) -> bool:
        """Whether the environment names a knob, or a settings file may: both come after the command line."""
        environ = {**os.environ, **self._environ}
        file = "config" in self._knobs[module] or FILE_VARIABLE in environ
        return file or f"TRIPTYCH_{module}_{name}".upper() in environ


def _module(role: str) -> str:
    """The service that a process runs: the second gateway is gateway-1."""
    return role.partition("-")[0]


def answers(host: str, port: int, path: str) -> bool:
    """Whether a server says OK to a GET."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _reserve(host: str, port: int) -> socket.socket:
    """Holds a port that our children share, without listening: a stranger who does not share can't take it."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise ClusterError(f"{host}:{port}: {error.strerror}") from None
    return held


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


def _ask_to_end(processes: Iterable[subprocess.Popen[bytes]], patience_s: float) -> None:
    """All at once; what still runs after the time is left to its fate."""
    asked = [process for process in processes if process.poll() is None]
    for process in asked:
        process.terminate()
    deadline = time.monotonic() + patience_s + _MARGIN_S
    for process in asked:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Standard input closes last: while the child lives, that would ask it a second time."""
    process.kill()
    process.wait()
    if process.stdin:
        process.stdin.close()
