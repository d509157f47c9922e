"""Which servers there are, and with which settings they do best on a CPU.

Peers lie under one folder, each in an environment of its own:

    LAB/models/smollm2-135m/                  the model as a Hugging Face folder, with tokenizer.json
    LAB/models/gguf/*Q4_1.gguf, *Q4_0.gguf    the same, quantized
    LAB/peers/vllm-venv/bin/vllm              vLLM for CPUs
    LAB/peers/tcmalloc/**/libtcmalloc*.so.4   preloaded for it where it is there, and so is its libiomp5.so
    LAB/peers/llama/build/bin/llama-server    llama.cpp
    LAB/peers/*venv*/bin/transformers         transformers, where fastapi is installed beside it
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from services.local import demo
from tests.engine.cluster import ROOT

OURS = "ours"
PORT = "{port}"
"""Stands for the port in a command."""
PEERS = ("vllm", "llama", "transformers")
SETTINGS = {"vllm-bf16": "vllm", "vllm-f32": "vllm", "llama-q4_0": "llama", "llama-q4_1": "llama"}
"""Peers with one of their settings: a server's name, and its peer."""
MODEL = "smollm2-135m"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Server:
    """How a server is started and asked. Servers of one group are one peer with several settings."""

    name: str
    group: str
    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    model: str | None = None  # None: the first that it lists
    extra_body: str = "{}"
    folder: Path = ROOT
    version: str = ""

    def at(self, port: int) -> list[str]:
        """The command with its port."""
        return [word.replace(PORT, str(port)) for word in self.command]


@dataclass(frozen=True, slots=True)
class Missing:
    """A server that can't be measured here."""

    name: str
    why: str


def find(lab: Path | None, wanted: list[str], ours: list[str], cores: int) -> list[Server | Missing]:
    """Ours first, then the peers: of PEERS with all their settings, of SETTINGS with one.

    `ours` are configurations as `our_server` reads them.
    """
    found: list[Server | Missing] = [our_server(text, lab) for text in ours]
    for name in wanted:
        if lab is None:
            found.append(Missing(name, "no folder with peers: LAB in the environment, or --lab"))
        else:
            settings = _FINDERS[SETTINGS.get(name, name)](lab, cores)
            found += [one for one in settings if name not in SETTINGS or one.name in (name, SETTINGS[name])]
    return found


def our_server(text: str, lab: Path | None = None) -> Server:
    """NAME, NAME=OPTIONS of `triptych serve`, or NAME@CHECKOUT=OPTIONS for the program of another folder.

    {lab} in the options is the folder with the peers. Without a model among them it is the Q4_1 file there, which is
    the demo model.
    """
    name, _, options = text.partition("=")
    name, _, checkout = name.partition("@")
    words = [word.replace("{lab}", str(lab)) for word in shlex.split(options)]
    if not words or words[0].startswith("-"):
        words.insert(0, str(gguf(lab, "Q4_1") or demo.fetch()))
    folder = Path(checkout).resolve() if checkout else ROOT
    free = ("--grpc-port=0", "--worker-metrics-port=0", "--engine-metrics-port=0", "--log-level=warning")
    command = (sys.executable, "-m", "services.cli", "serve", words[0], f"--http-port={PORT}", *free, *words[1:])
    return Server(
        name or "triptych",
        OURS,
        command,
        {"PYTHONPATH": str(folder)},
        "/health/ready",
        folder=folder,
        version=_said(["git", "-C", str(folder), "describe", "--always", "--dirty"]),
    )


def gguf(lab: Path | None, kind: str) -> Path | None:
    """The model's file of a type."""
    files = sorted((lab / "models" / "gguf").glob(f"*{kind}.gguf")) if lab else []
    return files[0] if files else None


def tokenizer(lab: Path | None) -> Path | None:
    """The folder with tokenizer.json by which prompts are cut, the same for all servers."""
    folder = lab / "models" / MODEL if lab else None
    return folder if folder and (folder / "tokenizer.json").exists() else None


def _vllm(lab: Path, cores: int) -> list[Server | Missing]:
    """OpenMP threads bound to the cores, and the two libraries that its own image preloads."""
    binary, model = lab / "peers/vllm-venv/bin/vllm", lab / "models" / MODEL
    if missing := _lacks(binary, model):
        return [Missing("vllm", missing)]
    libraries = [
        *(lab / "peers/tcmalloc").rglob("libtcmalloc*.so.4"),
        *(lab / "peers/vllm-venv/lib").glob("libiomp5.so"),
    ]
    environ = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
        **_OFFLINE,
    }
    limits = ("--max-model-len", "8192", "--max-num-seqs", "128")
    version = _version(binary.parent / "python", "vllm")
    return [
        Server(
            f"vllm-{name}",
            "vllm",
            (str(binary), "serve", str(model), "--host", "127.0.0.1", "--port", PORT, "--dtype", dtype, *limits),
            environ,
            version=version,
        )
        for name, dtype in (("bf16", "bfloat16"), ("f32", "float32"))
    ]


def _llama(lab: Path, cores: int) -> list[Server | Missing]:
    """A slot for each of 64 streams, 2,048 tokens each; flash attention is slower on CPUs that were tried."""
    binary = lab / "peers/llama/build/bin/llama-server"
    if missing := _lacks(binary):
        return [Missing("llama", missing)]
    threads = ("-t", str(cores), "-tb", str(cores))
    slots = ("-c", "131072", "-np", "64", "-cb", "-fa", "off", "-cram", "0", "--no-webui")
    version = _said([str(binary), "--version"]).partition("version: ")[2].partition("\n")[0]
    found: list[Server | Missing] = []
    for kind in ("Q4_0", "Q4_1"):
        name, model = f"llama-{kind.lower()}", gguf(lab, kind)
        if model is None:
            found.append(Missing(name, f"{lab / 'models/gguf'} has no *{kind}.gguf"))
            continue
        command = (str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", PORT, *threads, *slots)
        found.append(Server(name, "llama", command, version=version))
    return found


def _transformers(lab: Path, cores: int) -> list[Server | Missing]:
    """With continuous batching. It refuses fields that it does not know, and takes lengths in its own words."""
    model = lab / "models" / MODEL
    binaries = sorted((lab / "peers").glob("*venv*/bin/transformers"))
    serving = [binary for binary in binaries if _version(binary.parent / "python", "fastapi")]
    if not serving:
        return [Missing("transformers", f"{lab / 'peers'} has no *venv*/bin/transformers with fastapi beside it")]
    if missing := _lacks(model):
        return [Missing("transformers", missing)]
    command = (str(serving[0]), "serve", str(model), "--continuous-batching", "--host", "127.0.0.1", "--port", PORT)
    never_ends = {"generation_config": json.dumps({"eos_token_id": -1, "do_sample": False})}
    unknown = {"min_tokens": None, "ignore_eos": None}
    environ = {"OMP_NUM_THREADS": str(cores), **_OFFLINE}
    version = _version(serving[0].parent / "python", "transformers")
    extra = json.dumps({**never_ends, **unknown})
    return [
        Server("transformers", "transformers", command, environ, model=str(model), extra_body=extra, version=version)
    ]


_FINDERS = {"vllm": _vllm, "llama": _llama, "transformers": _transformers}


def _lacks(*paths: Path) -> str:
    return next((f"{path} does not exist" for path in paths if not path.exists()), "")


def _version(python: Path, package: str) -> str:
    """Of a package in an environment; empty where it is not installed."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return _said([str(python), "-c", code], error=False)


def _said(command: list[str], *, error: bool = True) -> str:
    """What a short command prints; empty where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError:
        return ""
    return (done.stdout + (done.stderr if error else "")).strip() if done.returncode == 0 else ""
