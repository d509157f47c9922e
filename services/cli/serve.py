"""`triptych serve [MODEL]`: worker, engine and gateways on this machine, until Ctrl-C or SIGTERM.

Every knob of the three roles is an option here. A knob that only one role has goes by its own name
(--max-num-seqs), one that several have sets all of them (--log-level) or one (--worker-log-level).
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.cli import client
from services.common.settings import Parser, Settings, SettingsError, argument, option
from services.engine.config import EngineSettings
from services.gateway.config import GatewaySettings
from services.local import demo
from services.local.cluster import PRIVATE_PORT, Cluster, ClusterError
from services.worker.config import WorkerSettings

ROLES: dict[str, type[Settings]] = {"gateway": GatewaySettings, "engine": EngineSettings, "worker": WorkerSettings}

_WIRED = {"worker": {"listen", "model"}, "engine": {"listen", "worker"}, "gateway": {"engine", "reuse_port"}}
"""Knobs that the cluster sets: the addresses between the roles, the model, and who shares a port."""

_OF_ONE_PROCESS = {"name", "metrics_port"}
"""Knobs that make no sense with one value for several processes."""

_MODEL_HELP = "GGUF file or Hugging Face folder; the demo model if left out"
_MOST_GATEWAYS = 64
_ECHO_S = 0.5


class Asked(NamedTuple):
    """What the command line asks for; `knobs` is what it gave of each role's."""

    model: str
    ask: str
    gateways: int
    knobs: dict[str, dict[str, Any]]


def main(command: str, argv: Sequence[str]) -> int:
    """Serves until a signal. Status 1 when a process of the cluster ends right after its start."""
    asked = parse(argv, f"triptych {command}")
    stop = _stop_at_signal()
    try:
        cluster = cluster_of(asked)
        print(f"Starting {', '.join(cluster.roles[:-1])} and {cluster.roles[-1]}", flush=True)
        cluster.start(stop)
        try:
            _greet(cluster, asked.ask, stop)
            children = _watch_children()
            while not stop.is_set():
                for said in cluster.mend():
                    print(f"triptych {command}: {said}", file=sys.stderr, flush=True)
                select.select([children], [], [])
                os.read(children, 4096)
            print("Stopping", flush=True)
        finally:
            cluster.stop()
    except (ClusterError, demo.DemoModelError) as error:
        if stop.is_set():
            return 0
        print(f"triptych {command}: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str], prog: str, description: str = __doc__) -> Asked:
    """Reads the command line. Raises SettingsError."""
    given = vars(build_parser(prog, description).parse_args(list(argv)))
    model, ask, config = (given.pop(name, "") for name in ("model", "ask", "config"))
    gateways = given.pop("gateways", 1)
    if not 1 <= gateways <= _MOST_GATEWAYS:
        raise SettingsError(f"--gateways: must be from 1 to {_MOST_GATEWAYS}, not {gateways}")
    if model and not Path(model).exists():
        raise SettingsError(f"MODEL: nothing lies at {model!r}; name a GGUF file or a Hugging Face folder")
    knobs: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
    for role, cls in ROLES.items():
        for name in cls.model_fields:
            for key in (f".{name}", f"{role}.{name}"):
                if key in given:
                    knobs[role][name] = given[key]
        if config:
            knobs[role]["config"] = config
        cls.resolve(knobs[role])
    return Asked(model, ask, gateways, knobs)


def build_parser(prog: str, description: str = __doc__) -> argparse.ArgumentParser:
    """The command line of `serve`, from the roles' own definitions."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{prog} [MODEL] [OPTION…]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--ask", metavar="TEXT", help="ask this once the cluster is ready, and print the answer")
    parser.add_argument(
        "--gateways", metavar="N", type=int, help="gateway processes on the same two ports (default: 1)"
    )
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML) with a table per role")
    shared = parser.add_argument_group("several roles", "also for one of them, as in --worker-log-level")
    groups = {role: parser.add_argument_group(role) for role in ROLES}
    for name in {name: None for cls in ROLES.values() for name in cls.model_fields}:
        owners = [role for role, cls in ROLES.items() if name in cls.model_fields and name not in _WIRED[role]]
        unique, joint = len(owners) == 1, len(owners) > 1 and name not in _OF_ONE_PROCESS
        if joint:
            shared.add_argument(option(name), dest=f".{name}", **_argument(owners[0], name))
        for role in owners:
            flags = [option(name)] * unique + [option(f"{role}_{name}")]
            kind = {**_argument(role, name), **({"help": argparse.SUPPRESS} if joint else {})}
            groups[role].add_argument(*flags, dest=f"{role}.{name}", **kind)
    return parser


def _argument(role: str, name: str) -> dict[str, Any]:
    return argument(ROLES[role], name, ROLES[role].model_fields[name])


def cluster_of(asked: Asked) -> Cluster:
    """The cluster that it describes, not started."""
    knobs = asked.knobs
    gateway = GatewaySettings.resolve(knobs["gateway"])
    worker = WorkerSettings.resolve(knobs["worker"])
    model = asked.model or worker.model
    if not model and EngineSettings.resolve(knobs["engine"]).served_model_name is None:
        knobs["engine"]["served_model_name"] = "simulated" if worker.simulated else demo.NAME
    if not model and not worker.simulated:
        model = str(demo.fetch())
    for role, cls in (("engine", EngineSettings), ("worker", WorkerSettings)):
        knobs[role]["metrics_port"] = cls.resolve(knobs[role]).metrics_port
    private_port = gateway.private_port
    if private_port is None and asked.gateways > 1:
        private_port = PRIVATE_PORT
    private = {"name": gateway.name, "private_host": gateway.private_host, "private_port": private_port}
    return Cluster(
        model=model,
        gateways=asked.gateways,
        host=gateway.host,
        http_port=gateway.http_port,
        grpc_port=gateway.grpc_port,
        drain_s=gateway.drain_s,
        worker=knobs["worker"],
        engine=knobs["engine"],
        gateway={**knobs["gateway"], **private},
    )


def _stop_at_signal() -> threading.Event:
    """Set at the first SIGINT or SIGTERM; a second one interrupts the drain.

    Where a whole process group is signalled, `make` passes the same signal on once more, so that
    one right after the first is no second one.
    """
    stop = threading.Event()
    first = 0.0

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal first
        if not stop.is_set():
            first = time.monotonic()
            stop.set()
        elif time.monotonic() - first > _ECHO_S:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


def _watch_children() -> int:
    """A file that has something to read once a child has ended or a signal has come, so that nobody has to look."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return reader


def _greet(cluster: Cluster, ask: str, stop: threading.Event) -> None:
    print(f"Ready. REST (OpenAI API) at {cluster.http_url}/v1, gRPC at {cluster.grpc_address}", flush=True)
    for name, address in cluster.private_addresses.items():
        print(f"{name}: health and metrics at http://{address}", flush=True)
    if ask:
        print(f"\n> {ask}", flush=True)
        client.run(client.answer(cluster.grpc_address, ask, stop.is_set))
    print("\nCtrl-C stops it.", flush=True)
