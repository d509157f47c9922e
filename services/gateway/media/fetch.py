"""Media from elsewhere by http and https, so that no URL leads into the operator's own network.

    URL ─▶ scheme, port, host allowed? ─▶ resolved once, every answer public? ─▶ connected to one of these answers
     ▲                                                                             │
     └──────────────────── redirect, a few times at most ──────────────────────────┘

Bytes, time and redirects are limited. No cookies, no proxies, no credentials, no content encoding.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import aiohttp
import aiohttp.abc
import yarl

from services.gateway.media.addresses import Hosts, is_public, literal
from services.gateway.media.faults import MALFORMED, REFUSED, UNREACHABLE, fault, too_large

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = {"User-Agent": "triptych", "Accept": "image/*, video/*", "Accept-Encoding": "identity"}
_TEXTS: Final = ("text/", "application/json", "application/xhtml+xml")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) to its addresses, all of them."""
Reach = Callable[[str, int], tuple[str, int]]
"""Where an address and port that were checked are connected to: there, except in a test."""


@dataclass(slots=True, frozen=True)
class Remote:
    """What an operator allows; see the knobs of these names."""

    hosts: tuple[str, ...] | None  # None: any that is public
    ports: tuple[int, ...] = (80, 443)
    redirects: int = 5
    timeout_s: float = 10.0
    max_bytes: int = 64 * 1024 * 1024


async def system_resolve(host: str, port: int) -> list[str]:
    """What the system's resolver says."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(sockaddr[0]) for *_, sockaddr in answers]


class _Pinned(aiohttp.abc.AbstractResolver):
    """Knows the addresses of one host that were checked, so that nobody is asked again."""

    def __init__(self, addresses: Sequence[str], reach: Reach) -> None:
        self._addresses = addresses
        self._reach = reach

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        """The addresses."""
        del family
        reached = [self._reach(address, port) for address in self._addresses]
        return [
            aiohttp.abc.ResolveResult(
                hostname=host,
                host=address,
                port=number,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address, number in reached
        ]

    async def close(self) -> None:
        """Nothing is held."""


class Fetcher:
    """Fetches what the operator allows."""

    def __init__(self, remote: Remote, *, resolve: Resolve = system_resolve, reach: Reach = lambda *at: at) -> None:
        self._remote = remote
        self._hosts = Hosts(remote.hosts)
        self._resolve = resolve
        self._reach = reach

    async def fetch(self, url: str, where: str) -> bytes:
        """The bytes behind a URL. Raises InvalidArgument at `where`; connects to no address that is not public."""
        try:
            async with asyncio.timeout(self._remote.timeout_s):
                return await self._follow(_parsed(url, where), where)
        except TimeoutError:
            raise fault(UNREACHABLE, where, f"nothing within {self._remote.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise fault(UNREACHABLE, where, f"could not be fetched: {type(error).__name__}") from None

    async def _follow(self, url: yarl.URL, where: str) -> bytes:
        for _ in range(self._remote.redirects + 1):
            answer = await self._get(url, await self._checked(url, where), where)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise fault(REFUSED, where, f"more than {self._remote.redirects} redirects")

    async def _checked(self, url: yarl.URL, where: str) -> list[str]:
        """The addresses of a URL's host, all of them public. Raises for whatever else it leads to."""

        def refuse(words: str) -> NoReturn:
            raise fault(REFUSED, where, words)

        host, port = url.raw_host, url.port
        if url.scheme not in ("http", "https") or not host or port is None:
            refuse("only http and https URLs with a host are fetched")
        if url.raw_user is not None or url.raw_password is not None:
            refuse("a URL with credentials is not fetched")
        if port not in self._remote.ports:
            refuse(f"port {port} is not allowed by this server")
        if not self._hosts.allow(host):
            refuse(f"the host {host!r:.200} is not allowed by this server")
        try:
            address = literal(host)
        except ValueError:
            refuse(f"the host {host!r:.200} is an address in a notation that is not taken")
        if address is not None:
            answers = [str(address)]
        else:
            try:
                answers = list(await self._resolve(host, port))
            except (OSError, UnicodeError):
                raise fault(UNREACHABLE, where, f"the host {host!r:.200} is not known") from None
        found = [literal(answer) for answer in answers]
        if not found or not all(address is not None and is_public(address) for address in found):
            refuse(f"the host {host!r:.200} is not on the public internet")
        return answers

    async def _get(self, url: yarl.URL, addresses: Sequence[str], where: str) -> bytes | yarl.URL:
        """What a URL answers, or where it redirects to."""
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(addresses, self._reach), use_dns_cache=False, force_close=True
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),  # of all hops together, outside
            ) as session,
            session.get(url, headers=_HEADERS, allow_redirects=False) as answer,
        ):
            if answer.status in _REDIRECTS:
                return _redirected(url, answer.headers.get("Location"), where)
            if answer.status != 200:
                raise fault(UNREACHABLE, where, f"the host answered {answer.status}")
            if answer.headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
                raise fault(REFUSED, where, "the host answered in an encoding that was not asked for")
            if answer.content_type.startswith(_TEXTS) and "Content-Type" in answer.headers:
                raise fault(MALFORMED, where, f"the host answered {answer.content_type!r:.80}")
            return await self._read(answer, where)

    async def _read(self, answer: aiohttp.ClientResponse, where: str) -> bytes:
        limit = self._remote.max_bytes
        if answer.content_length is not None and answer.content_length > limit:
            raise too_large(where, limit)
        pieces = bytearray()
        async for piece in answer.content.iter_any():
            pieces += piece
            if len(pieces) > limit:
                raise too_large(where, limit)
        return bytes(pieces)


def _parsed(url: str, where: str) -> yarl.URL:
    """One reading for all: what is checked is what is connected to."""
    try:
        return yarl.URL(url)
    except (ValueError, TypeError):
        raise fault(MALFORMED, where, "no URL") from None


def _redirected(url: yarl.URL, location: str | None, where: str) -> yarl.URL:
    if not location:
        raise fault(UNREACHABLE, where, "the host redirected to nowhere")
    return url.join(_parsed(location, where))
