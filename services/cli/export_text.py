"""`triptych export-text DIR`: writes a model's text files, from a running process or from a model's path.

Only a worker opens models. For a path one is therefore started here, asked, and stopped; for a
folder a simulated one, which loads neither torch nor weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import grpc.aio

from protos import common_pb2, engine_pb2, engine_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.cli import client, own_worker
from services.common.channel import connect
from services.common.settings import Settings, SettingsError, build_parser, knob
from services.local.cluster import CHILD

_START_S = 60.0


class ExportSettings(Settings):
    """Writes a model's text files: tokenizer, config, generation defaults, chat template."""

    section: ClassVar[str] = "export"

    engine: str | None = knob(None, "address of a running engine to ask")
    worker: str | None = knob(None, "address of a running worker to ask")
    model: Path | None = knob(None, "GGUF file or Hugging Face folder to read instead")


def main(command: str, argv: Sequence[str]) -> int:
    """Writes the files and names them."""
    parser = build_parser(ExportSettings, f"triptych {command}")
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write to; made if it is not there")
    given = vars(parser.parse_args(list(argv)))
    folder: Path = given.pop("folder")
    settings = ExportSettings.resolve(given)
    if sum(source is not None for source in (settings.engine, settings.worker, settings.model)) != 1:
        raise SettingsError("name one source: --engine ADDRESS, --worker ADDRESS or --model PATH")
    return client.run(_export(settings, folder))


async def _export(settings: ExportSettings, folder: Path) -> None:
    if settings.engine:
        async with connect(settings.engine) as channel:
            files = await _collect(_from_engine(channel))
    elif settings.worker:
        async with connect(settings.worker) as channel:
            files = await _collect(_from_worker(channel))
    else:
        assert settings.model
        files = await _from_path(settings.model, _is_folder(settings.model))
    _write(folder, files)


async def _from_engine(channel: grpc.aio.Channel) -> AsyncIterator[common_pb2.TextFileChunk]:
    stub = engine_pb2_grpc.EngineServiceStub(channel)
    async for message in stub.GetTextFiles(engine_pb2.EngineServiceGetTextFilesRequest()):
        yield message.chunk


async def _from_worker(channel: grpc.aio.Channel) -> AsyncIterator[common_pb2.TextFileChunk]:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    async for message in stub.GetTextFiles(worker_pb2.WorkerServiceGetTextFilesRequest()):
        yield message.chunk


async def _from_path(model: Path, simulated: bool) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="triptych-", dir="/tmp", ignore_cleanup_errors=True) as private:
        address = f"unix:{private}/worker"
        options = [f"--model={model}", f"--listen={address}", "--metrics-port=0", "--log-level=error", "--drain-s=0"]
        options += ["--simulated"] * simulated
        process = await asyncio.create_subprocess_exec(
            *CHILD, private, "services.worker", *options, stdin=subprocess.PIPE
        )
        try:
            async with connect(address) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                await own_worker.load(stub, "export-text", lambda: process.returncode is not None, _START_S)
                return await _collect(_from_worker(channel))
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def _is_folder(model: Path) -> bool:
    return model.is_dir()


async def _collect(chunks: AsyncIterator[common_pb2.TextFileChunk]) -> dict[str, bytes]:
    """The files by name, each checked against its hash."""
    files: dict[str, bytearray] = {}
    digests: dict[str, bytes] = {}
    async for chunk in chunks:
        files.setdefault(chunk.file.name, bytearray()).extend(chunk.data)
        digests[chunk.file.name] = chunk.file.sha256
    for name, data in files.items():
        if hashlib.sha256(data).digest() != digests[name]:
            raise SettingsError(f"{name} arrived damaged")
    return {name: bytes(data) for name, data in files.items()}


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if Path(name).name != name:
            raise SettingsError(f"refusing to write {name!r}: not a plain file name")
        (folder / name).write_bytes(data)
        print(folder / name)
