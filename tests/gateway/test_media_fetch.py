"""C130: no URL leads anywhere but to the public internet, and only as the operator allows.

A stub on loopback stands for the internet: names resolve to public addresses by a table of the test, and what was
checked is then connected to the stub instead. So a connection is made only where the fetcher holds it to be public.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from services.common.errors import InvalidArgument
from services.gateway.media.addresses import Hosts, is_public, literal
from services.gateway.media.fetch import Fetcher, Remote, system_resolve

PUBLIC = "93.184.216.34"
PICTURE = b"\x89PNG" + bytes(range(256)) * 40
BOMB = gzip.compress(bytes(1 << 20))
ANY = Remote(hosts=None, timeout_s=5.0)


@dataclass
class Internet:
    """Names, what answers behind them, who was resolved, and which addresses were connected to."""

    names: dict[str, list[list[str]]] = field(default_factory=lambda: {"example.com": [[PUBLIC]]})
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    resolved: list[str] = field(default_factory=list)
    reached: list[tuple[str, int]] = field(default_factory=list)
    requests: list[web.Request] = field(default_factory=list)
    port: int = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        del port
        self.resolved.append(host)
        if host not in self.names:
            raise OSError("no such name")
        answers = self.names[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def reach(self, address: str, port: int) -> tuple[str, int]:
        self.reached.append((address, port))
        return "127.0.0.1", self.port

    def fetcher(self, remote: Remote = ANY) -> Fetcher:
        return Fetcher(remote, resolve=self.resolve, reach=self.reach)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return web.Response(body=PICTURE) if self.answer is None else await self.answer(request)


@contextlib.asynccontextmanager
async def internet(tls: ssl.SSLContext | None = None) -> AsyncIterator[Internet]:
    net = Internet()
    server = web.Server(net.handle)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    assert site._server is not None
    net.port = site._server.sockets[0].getsockname()[1]
    try:
        yield net
    finally:
        await runner.cleanup()


async def refusal(fetcher: Fetcher, url: str) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        await fetcher.fetch(url, "messages[0].content[1]")
    assert caught.value.field == "messages[0].content[1]"
    assert caught.value.message.startswith("messages[0].content[1]: ")
    return caught.value


async def test_a_public_host_is_fetched_once_resolved_with_its_own_name() -> None:
    async with internet() as net:
        assert await net.fetcher().fetch("http://example.com/a%20b?c=d", "x") == PICTURE
        assert net.resolved == ["example.com"]
        assert net.reached == [(PUBLIC, 80)]
        (request,) = net.requests
        assert (request.host, request.raw_path) == ("example.com", "/a%20b?c=d")
        assert request.headers["Accept-Encoding"] == "identity"
        assert not {"Cookie", "Authorization", "Referer"} & set(request.headers)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
async def test_tls_is_asked_for_the_hosts_own_name_and_verified(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
        "-subj", "/CN=example.com", "-keyout", key, "-out", certificate, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await made.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    named: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: named.append(name)
    async with internet(context) as net:
        error = await refusal(net.fetcher(), "https://example.com/")
        assert error.reason == "MEDIA_UNREACHABLE"  # nobody has signed the certificate
        assert (named, net.reached, net.requests) == (["example.com"], [(PUBLIC, 443)], [])


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "0", "0.0.0.0", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.0.8", "192.0.0.192", "192.88.99.1", "168.63.129.16",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "2130706433", "0x7f000001", "0x7f.1", "0X7F.0.0.1", "0177.0.0.1", "017700000001", "127.0.0.1.", "1.2.3.4.5",
        "3232235777", "0xa9fea9fe", "08.8.8.8", "①②⑦.⓪.⓪.①", "１２７.0.0.1", "127。0。0。1",
        "[::1]", "[::]", "[::ffff:10.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[fe80::1]", "[fe80::1%25eth0]",
        "[fc00::1]", "[fec0::1]", "[ff02::1]", "[64:ff9b::a00:1]", "[64:ff9b:1::a00:1]", "[2002:7f00:1::]",
        "[2002:a9fe:a9fe::1]", "[2001:0:7f00:1::f5ff:fffe]", "[2001:db8::1]", "[3fff::1]",
        "[::ffff:192.0.0.192]", "[64:ff9b::a83f:8110]",
    ],
)  # fmt: skip
async def test_addresses_that_are_not_public_are_refused_in_every_notation(host: str) -> None:
    async with internet() as net:
        net.names |= {"127.0.0.1.": [[PUBLIC]]}
        for url in (f"http://{host}/", f"https://{host}:443/x", f"HTTP://{host}"):
            await refusal(net.fetcher(), url)
        assert (net.reached, net.requests) == ([], [])


@pytest.mark.parametrize(
    "answers",
    [["127.0.0.1"], ["10.1.2.3"], [PUBLIC, "10.0.0.1"], ["10.0.0.1", PUBLIC], ["::1"], ["::ffff:169.254.169.254"],
     ["fe80::1%eth0"], ["2606:2800:220:1::1", "fd00::1"], [], ["not an address"], ["2130706433"]],
)  # fmt: skip
async def test_a_name_is_refused_if_any_of_its_addresses_is_not_public(answers: list[str]) -> None:
    async with internet() as net:
        net.names["example.com"] = [answers]
        await refusal(net.fetcher(), "http://example.com/")
        assert (net.reached, net.requests) == ([], [])


async def test_a_name_that_changes_its_mind_is_connected_where_it_was_checked() -> None:
    async with internet() as net:
        net.names["example.com"] = [[PUBLIC], ["127.0.0.1"]]
        assert await net.fetcher().fetch("http://example.com/", "x") == PICTURE
        assert net.resolved == ["example.com"]
        assert net.reached == [(PUBLIC, 80)]


async def test_the_systems_own_names_of_this_host_are_refused() -> None:
    await refusal(Fetcher(ANY, resolve=system_resolve), "http://localhost/")


def redirect(to: str, status: int = 302) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/end":
            return web.Response(body=PICTURE)
        return web.Response(status=status, headers={"Location": to} if to else {})

    return answer


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_followed_and_resolved_again(status: int) -> None:
    async with internet() as net:
        net.names["cdn.example.org"] = [["1.1.1.1"]]
        net.answer = redirect("https://cdn.example.org:80/end".replace("https", "http"), status)
        assert await net.fetcher().fetch("http://example.com/a", "x") == PICTURE
        assert net.resolved == ["example.com", "cdn.example.org"]
        assert net.reached == [(PUBLIC, 80), ("1.1.1.1", 80)]
        net.answer = redirect("/end", status)
        assert await net.fetcher().fetch("http://example.com/a", "x") == PICTURE


@pytest.mark.parametrize(
    "to",
    ["http://10.0.0.1/", "http://[::ffff:127.0.0.1]/", "http://2130706433/", "//inside.example.com/", "file:///etc/passwd",
     "http://example.com:22/", "ftp://example.com/", "http://user:pw@example.com/end", "gopher://example.com/", "",
     "data:image/png;base64,AAAA", "http://[::1"],
)  # fmt: skip
async def test_every_redirect_is_checked_as_the_first_url(to: str) -> None:
    async with internet() as net:
        net.names["inside.example.com"] = [["192.168.0.7"]]
        net.answer = redirect(to)
        await refusal(net.fetcher(), "http://example.com/")
        assert len(net.requests) == 1


async def test_redirects_are_counted() -> None:
    async with internet() as net:

        async def hop(request: web.Request) -> web.StreamResponse:
            left = int(request.path[1:])
            return web.Response(status=302, headers={"Location": f"/{left - 1}"}) if left else web.Response(body=b"end")

        net.answer = hop
        assert await net.fetcher().fetch("http://example.com/5", "x") == b"end"
        error = await refusal(net.fetcher(), "http://example.com/6")
        assert (error.reason, len(net.requests)) == ("MEDIA_REFUSED", 6 + 6)
        assert await net.fetcher(replace(ANY, redirects=0)).fetch("http://example.com/0", "x") == b"end"
        await refusal(net.fetcher(replace(ANY, redirects=0)), "http://example.com/1")


@pytest.mark.parametrize(
    "url",
    ["http://example.com:8080/", "http://example.com:22/", "http://user@example.com/", "http://user:pw@example.com/",
     "http://:pw@example.com/", "ftp://example.com/", "http:///x", "http:example.com", "http://", "//example.com/",
     "http://example.com:99999/", "http://exa mple.com/", "http://example.com\\@10.0.0.1/", "javascript:alert(1)"],
)  # fmt: skip
async def test_other_ports_schemes_and_credentials_are_refused(url: str) -> None:
    async with internet() as net:
        await refusal(net.fetcher(), url)
        assert net.requests == []
        if url == "http://example.com:8080/":
            assert await net.fetcher(replace(ANY, ports=(8080,))).fetch(url, "x") == PICTURE
            assert net.reached == [(PUBLIC, 8080)]


async def test_only_hosts_that_are_named_are_fetched_from_where_some_are() -> None:
    async with internet() as net:
        net.names |= {name: [[PUBLIC]] for name in ("a.example.org", "example.org", "evil-example.org")}
        fetcher = net.fetcher(replace(ANY, hosts=("Example.com", ".example.org")))
        assert await fetcher.fetch("http://EXAMPLE.com/", "x") == PICTURE
        assert await fetcher.fetch("http://a.example.org/", "x") == PICTURE
        for host in ("example.org", "evil-example.org", "notexample.com", "example.com.evil.org", PUBLIC):
            error = await refusal(fetcher, f"http://{host}/")
            assert error.reason == "MEDIA_REFUSED"
        net.answer = redirect("http://evil-example.org/end")
        await refusal(fetcher, "http://example.com/")
        await refusal(net.fetcher(replace(ANY, hosts=())), "http://example.com/")
        assert net.resolved == ["example.com", "a.example.org", "example.com"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: web.Response(status=404, body=PICTURE), "MEDIA_UNREACHABLE"),
        (lambda: web.Response(status=500), "MEDIA_UNREACHABLE"),
        (lambda: web.Response(status=206, body=PICTURE), "MEDIA_UNREACHABLE"),
        (lambda: web.Response(text="<html>", content_type="text/html"), "MEDIA_MALFORMED"),
        (lambda: web.json_response({"error": 1}), "MEDIA_MALFORMED"),
        (lambda: web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}), "MEDIA_REFUSED"),
        (lambda: web.Response(body=bytes(20_001)), "MEDIA_TOO_LARGE"),
    ],
)  # fmt: skip
async def test_what_is_no_media_is_told_at_the_part(answer: Callable[[], web.StreamResponse], reason: str) -> None:
    async with internet() as net:

        async def handle(request: web.Request) -> web.StreamResponse:
            return answer()

        net.answer = handle
        error = await refusal(net.fetcher(replace(ANY, max_bytes=20_000)), "http://example.com/")
        assert error.reason == reason


async def test_an_answer_without_a_length_is_cut_off_at_the_limit() -> None:
    async with internet() as net:
        sent = 0

        async def endless(request: web.Request) -> web.StreamResponse:
            nonlocal sent
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while sent < 50_000_000:
                    await response.write(bytes(65536))
                    sent += 65536
            return response

        net.answer = endless
        error = await refusal(net.fetcher(replace(ANY, max_bytes=100_000)), "http://example.com/")
        assert error.reason == "MEDIA_TOO_LARGE"
        assert sent < 50_000_000


async def test_a_host_that_does_not_answer_in_time_is_given_up() -> None:
    async with internet() as net:
        gone = asyncio.Event()

        async def silent(request: web.Request) -> web.StreamResponse:
            try:
                await asyncio.sleep(60)
            finally:
                gone.set()
            return web.Response()

        async def drip(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                for _ in range(600):
                    await response.write(b"x")
                    await asyncio.sleep(0.05)
            return response

        for answer in (silent, drip):
            net.answer = answer
            error = await refusal(net.fetcher(replace(ANY, timeout_s=0.2)), "http://example.com/")
            assert error.reason == "MEDIA_UNREACHABLE"


async def test_a_resolver_that_hangs_is_given_up_and_an_unknown_name_is_told() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return [PUBLIC]

    error = await refusal(Fetcher(replace(ANY, timeout_s=0.1), resolve=never), "http://example.com/")
    assert error.reason == "MEDIA_UNREACHABLE"
    async with internet() as net:
        assert (await refusal(net.fetcher(), "http://unknown.example/")).reason == "MEDIA_UNREACHABLE"


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2002:808:808::1"])
def test_public_addresses_are_public(address: str) -> None:
    found = literal(address)
    assert found is not None
    assert is_public(found)


@pytest.mark.parametrize("host", ["example.com", "1.example", "xn--bcher-kva.example", "a-1.b2", "0x7f.example"])
def test_names_are_no_addresses(host: str) -> None:
    assert literal(host) is None


def test_hosts_are_compared_without_case_and_last_dot() -> None:
    hosts = Hosts(("A.example.", ".b.example"))
    assert [hosts.allow(host) for host in ("a.EXAMPLE", "a.example.", "x.B.example", "b.example", "xa.example")] == [
        True, True, True, False, False,
    ]  # fmt: skip
