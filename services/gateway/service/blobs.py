"""BlobService: blobs of media for workers that do not share this host's folder, on a private port of the process.

And the way back: a blob that a worker did not find is given its name again, from the pin that its request holds.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from protos import gateway_pb2, gateway_pb2_grpc
from services.common.channel import CHUNK_BYTES
from services.common.errors import FailedPrecondition, InvalidArgument, NotFound
from services.common.server import Server
from services.gateway.media.store import BlobStore

SERVICE = "triptych.v1.BlobService"
_HASH_BYTES = 32
_ANY_ADDRESS = ("0.0.0.0", "::", "")
Store = Callable[[], BlobStore | None]
"""The store, once there is one: a process makes it when a model that takes media comes."""


class BlobDoor(gateway_pb2_grpc.BlobServiceServicer):  # type: ignore[misc]
    """Serves the blobs of one store to workers. `address` is there once it has started."""

    def __init__(self, store: Store, host: str, port: int, announce: str = "") -> None:
        """Listens at host and port, 0 for any free one; workers are told `announce`, or the host, as its name."""
        self._store = store
        self._host, self._announce = host, announce
        self._server = Server([host_port(host, port)], options=[("grpc.so_reuseport", 0)])
        self._one_at_a_time = asyncio.Lock()
        gateway_pb2_grpc.add_BlobServiceServicer_to_server(self, self._server.grpc)

    async def start(self) -> None:
        """Listens."""
        await self._server.start(SERVICE)
        await self._server.set_ready(True)

    async def stop(self) -> None:
        """Frees the port."""
        await self._server.stop(0)

    @property
    def address(self) -> str:
        """host:port for workers."""
        host = self._announce or (socket.gethostname() if self._host in _ANY_ADDRESS else self._host)
        return host_port(host, self._server.ports[0])

    async def GetBlob(
        self, request: gateway_pb2.GetBlobRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[gateway_pb2.GetBlobResponse]:
        """The blob, in pieces."""
        if len(request.hash) != _HASH_BYTES:
            raise InvalidArgument(f"hash has {len(request.hash)} bytes instead of {_HASH_BYTES}", field="hash")
        store = self._store()
        file = store.open(request.hash) if store is not None else None
        if file is None:
            raise NotFound(f"there is no blob {request.hash.hex()}", field="hash")
        with file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            for start in range(0, size or 1, CHUNK_BYTES):
                data = await asyncio.to_thread(os.pread, descriptor, CHUNK_BYTES, start)
                yield gateway_pb2.GetBlobResponse(data=data, size=None if start else size)

    async def put_back(self, names: Sequence[bytes]) -> None:
        """Blobs that a worker did not find have their names again. Raises FailedPrecondition for one that is gone."""
        store = self._store()
        for name in names:
            pin = store.pin(name) if store is not None else None
            if store is None or pin is None:
                raise FailedPrecondition(f"the blob {name.hex()} is gone", reason="MEDIA_MISSING")
            try:
                async with self._one_at_a_time:
                    await asyncio.to_thread(store.put_back, name)
            finally:
                pin.release()


def host_port(host: str, port: int) -> str:
    """The address of a port, as gRPC reads it: an IPv6 host stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
