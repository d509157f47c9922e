"""HTTP in front of an Api: routes, body limit, errors as JSON, and clients that leave.

Starlette routes; the endpoints are plain ASGI. A server does not cancel a plain ASGI endpoint when
its client goes away, so each request has a watcher that does, streaming or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import InvalidArgument, NotFound, TriptychError, internal
from services.common.logs import Log
from services.gateway.rest import openapi, routes
from services.gateway.rest.http import OUTLET
from services.gateway.rest.reply import JSON, Api, Outlet, Reply, error_body, error_headers, event
from services.gateway.trace import REQUEST_ID, request_id_of

_log = Log("http")
POSTS = {row.path: row.operation for row in routes.API if row.method == "POST"}
CLIENT_LEFT = 499
Observe = Callable[[str, str, int, float], None]
"""(method, route, status, seconds) of an answered request."""


class _Gone(Exception):
    """The client closed the connection."""


class BodyTooLarge(InvalidArgument):
    """The body is longer than the limit."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is longer than {limit} bytes", reason="BODY_TOO_LARGE")


@dataclass(slots=True, frozen=True)
class Site:
    """What the HTTP server is made of."""

    api: Api
    version: str
    metrics: Callable[[], bytes]
    metrics_type: str
    max_body_bytes: int
    observe: Observe


async def _read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Sender:
    """Sends the answer and remembers what was sent."""

    __slots__ = ("_outlet", "_request_id", "_send", "_streaming", "status")

    def __init__(self, send: Send, request_id: str, outlet: Outlet | None) -> None:
        self._send = send
        self._outlet = outlet
        self._request_id = request_id
        self._streaming = False
        self.status = 0

    async def start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        pairs = [(b"content-type", content_type.encode()), (REQUEST_ID.encode(), self._request_id.encode())]
        pairs += [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
        self.status = status

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str], content_type: str = JSON) -> None:
        await self.start(status, content_type, {**headers, "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def reply(self, reply: Reply) -> None:
        if isinstance(reply.body, bytes):
            await self.whole(200, reply.body, {}, reply.content_type)
            return
        send = self._send
        async with contextlib.aclosing(reply.body):
            await self.start(200, reply.content_type, {"cache-control": "no-cache"})
            self._streaming = True
            if reply.pour is not None and self._outlet is not None:
                await reply.pour(self._outlet)
            else:
                async for chunk in reply.body:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def error(self, error: TriptychError) -> None:
        if not self.status:
            await self.whole(error.http_status, error_body(error), error_headers(error))
        elif self._streaming:
            await self._send({"type": "http.response.body", "body": event(error_body(error))})


class Endpoint:
    """The ASGI endpoint of one operation of the API."""

    def __init__(self, site: Site, operation: str, route: str) -> None:
        self._site = site
        self._operation = operation
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the operation beside a watcher; whichever ends first ends the other."""
        began = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        headers[REQUEST_ID] = request_id_of(headers)
        sender = _Sender(send, headers[REQUEST_ID], scope.get("extensions", {}).get(OUTLET))
        try:
            body = await self._body(scope, receive, headers)
            status = await self._beside_watcher(body, headers, sender, receive)
        except _Gone:
            status = CLIENT_LEFT
        except TriptychError as error:
            await sender.error(error)
            status = error.http_status
        self._site.observe(scope["method"], self._route, status, time.monotonic() - began)

    async def _body(self, scope: Scope, receive: Receive, headers: Mapping[str, str]) -> bytes:
        if scope["method"] == "GET":
            name: str = scope.get("path_params", {}).get("model", "")
            return name.encode()
        return await _read_body(receive, headers, self._site.max_body_bytes)

    async def _beside_watcher(self, body: bytes, headers: Mapping[str, str], sender: _Sender, receive: Receive) -> int:
        work = asyncio.create_task(self._answer(body, headers, sender))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not work.done()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        return CLIENT_LEFT if left else sender.status

    async def _answer(self, body: bytes, headers: Mapping[str, str], sender: _Sender) -> None:
        try:
            await sender.reply(await self._site.api.call(self._operation, body, headers))
        except TriptychError as error:
            await sender.error(error)
        except Exception as error:  # the HTTP twin of the gRPC interceptor: nothing may leave without an answer
            wrapped = internal()
            _log.error("request failed", exc_info=error, operation=self._operation, error_id=wrapped.error_id)
            await sender.error(wrapped)


def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, as OpenAI's error object."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    known: TriptychError
    if error.status_code == 404:
        known = NotFound(f"no route {method} {path}", reason="ROUTE_NOT_FOUND")
    elif error.status_code == 405:
        known = InvalidArgument(f"{path} does not take {method}", reason="METHOD_NOT_ALLOWED")
    else:
        known = InvalidArgument(str(error.detail))
    headers = {**(error.headers or {}), REQUEST_ID: request_id_of(request.headers)}
    return Response(error_body(known), error.status_code, headers, JSON)


class _Shortcut:
    """Requests of the usual routes go straight to their endpoints.

    Starlette wraps `send` twice for what an endpoint might fail to catch; these catch everything, and send often.
    """

    def __init__(self, site: Site, others: ASGIApp) -> None:
        self._endpoints = {(row.method, row.path): Endpoint(site, row.operation, row.path) for row in routes.API}
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (endpoint or self._others)(scope, receive, send)


def application(site: Site) -> ASGIApp:
    """The ASGI application that clients reach."""
    described = openapi.document(site.version)

    async def description(_: Request) -> Response:
        return Response(described, media_type=JSON)

    path = routes.DESCRIPTION.path
    rows = [*(_endpoint(site, row) for row in routes.API), *_of_process(site), Route(path, description)]
    return _Shortcut(site, _starlette(rows))


def private(site: Site) -> Starlette:
    """The ASGI application for whoever looks after this process and no other: health, version, metrics."""
    return _starlette(_of_process(site))


def _starlette(rows: Sequence[BaseRoute]) -> Starlette:
    return Starlette(routes=rows, exception_handlers={HTTPException: _on_http_error})


def _endpoint(site: Site, row: routes.Row) -> Route:
    endpoint = Endpoint(site, row.operation, row.path)
    return Route(row.path.replace("{model}", "{model:path}"), endpoint, methods=[row.method])


def _of_process(site: Site) -> list[Route]:
    def json(document: object, status: int = 200) -> Response:
        return Response(orjson.dumps(document), status, media_type=JSON)

    async def live(_: Request) -> Response:
        return json({"status": "ok"})

    async def ready(_: Request) -> Response:
        missing = await site.api.obstacle()
        return json({"status": "ok"}) if missing is None else json({"status": "not ready", "missing": missing}, 503)

    async def version(_: Request) -> Response:
        return json({"version": site.version})

    async def metrics(_: Request) -> Response:
        return Response(site.metrics(), media_type=site.metrics_type)

    answers = {"live": live, "ready": ready, "health": ready, "version": version, "metrics": metrics}
    return [Route(row.path, answers[row.operation], methods=[row.method]) for row in routes.PROCESS]
