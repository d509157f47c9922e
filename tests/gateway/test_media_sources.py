"""Where bytes come from: data: URLs (C128), files below one folder, uploads, names. Bad input by its part."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted
from services.gateway.media.sources import Sourced, Sources
from services.gateway.media.uploads import Uploads
from services.gateway.parts import MediaPart

WHERE = "messages[2].content[1]"
LIMIT = 300_000
RFC_4648 = re.compile(r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{4})")


def part(source: str | bytes, modality: Literal["image", "video"] = "image", uuid: str | None = None) -> MediaPart:
    return MediaPart(modality, source, WHERE, uuid)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "uploads", 1 << 20, LIMIT)


def sources(uploads: Uploads, files: str = "") -> Sources:
    return Sources(LIMIT, uploads, None, files)


async def refusal(made: Sources, asked: MediaPart, salt: str = "") -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        await made.read(asked, salt)
    assert caught.value.field == WHERE
    assert caught.value.message.startswith(f"{WHERE}: ")
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 65_536, 200_001, LIMIT])
async def test_a_data_url_is_its_bytes(uploads: Uploads, size: int) -> None:
    data = bytes(i * 7 % 256 for i in range(size))
    for url in (data_url(data), "DATA" + data_url(data, "Image/PNG")[4:], data_url(data, "image/png;name=a.png")):
        assert await sources(uploads).read(part(url), "") == Sourced(data, hashlib.sha256(data).digest())
    assert await sources(uploads).read(part(data_url(data, "video/mp4"), "video"), "") == Sourced(
        data, hashlib.sha256(data).digest()
    )


@given(data=st.binary(min_size=1, max_size=40), at=st.integers(0, 60), other=st.characters(max_codepoint=0x2FF))
def test_base64_is_strict(data: bytes, at: int, other: str) -> None:
    """One character put in somewhere: what is taken is what RFC 4648 takes, and no more."""
    text = base64.b64encode(data).decode()
    text = text[: at % (len(text) + 1)] + other + text[at % (len(text) + 1) :]
    made = Sources(LIMIT, Uploads(Path("/nowhere"), 1, 1))
    reading = made.read(part(f"data:image/png;base64,{text}"), "")
    if RFC_4648.fullmatch(text):
        assert asyncio.run(reading).data == base64.b64decode(text)
    else:
        with pytest.raises(InvalidArgument):
            asyncio.run(reading)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,not!!!base64!!!",
        "data:image/png,abc",
        "data:text/plain;base64,aGVsbG8=",
        "data:",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:;base64,AAAA",
        "data:image/png;base64,AAA",
        "data:image/png;base64,AAA=AAAA",
        "data:image/png;base64,AAAA=",
        "data:image/png;base64,AAAA====",
        "data:image/png;base64,A===",
        "data:image/png;base64,AA==\n",
        "data:image/png;base64, AAAA",
        "data:image/png;base64,AAA-",
        "data:image/png;base64,AAAé",
        "data:video/mp4;base64,AAAA",
        "data:video/jpeg;base64,AAAA",
        "data:application/octet-stream;base64,AAAA",
        f"data:{'x' * 300},AAAA",
        "data:image/png;base64," + "A" * 100_000 + "!",
        "data:image/png;base64," + "A" * 100_001,
    ],
)
async def test_a_data_url_that_is_none_is_told_at_its_part(uploads: Uploads, url: str) -> None:
    assert (await refusal(sources(uploads), part(url))).reason == "MEDIA_MALFORMED"


async def test_a_data_url_that_is_too_long_is_refused_before_it_is_decoded(uploads: Uploads) -> None:
    url = data_url(bytes(LIMIT + 1))
    assert (await refusal(sources(uploads), part(url))).reason == "MEDIA_TOO_LARGE"
    assert (await refusal(sources(uploads), part(url[:-1] + "!" * 10_000))).reason == "MEDIA_TOO_LARGE"


@pytest.mark.parametrize("url", ["ftp://h/x", "x", "/etc/passwd", "blob:abc", "javascript:1", "://", "http", " data:,"])
async def test_other_kinds_of_url_are_refused(uploads: Uploads, url: str) -> None:
    assert (await refusal(sources(uploads), part(url))).reason == "MEDIA_MALFORMED"


@pytest.mark.parametrize(
    "url", ["http://" + "\u00e9." * 4096, "file:///" + "a/" * 4096, "http://example.com/" + "x" * 8192]
)
async def test_a_long_url_is_refused_before_it_is_read(uploads: Uploads, url: str) -> None:
    """A host of a million labels takes seconds to be read as a name."""

    class Unread:
        async def fetch(self, url: str, where: str) -> bytes:
            raise AssertionError("it was to be fetched")

    found = await refusal(Sources(LIMIT, uploads, Unread(), "/"), part(url))
    assert (found.reason, found.message) == ("MEDIA_MALFORMED", f"{WHERE}: a URL of more than 8192 characters")


@pytest.mark.parametrize(
    "url", ["https://example.com/a.png", "http://127.0.0.1/", "HTTPS://example.com", "file:///etc/passwd"]
)
async def test_nothing_is_fetched_or_read_unless_the_operator_says_so(uploads: Uploads, url: str) -> None:
    assert (await refusal(sources(uploads), part(url))).reason == "MEDIA_REFUSED"


class TestFiles:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "media"
        (root / "in side").mkdir(parents=True)
        (root / "in side" / "a%b.png").write_bytes(b"a picture")
        (root / "large.png").write_bytes(bytes(LIMIT + 1))
        (root / "empty.png").touch()
        (tmp_path / "secret.png").write_bytes(b"secret")
        (tmp_path / "media-too").mkdir()
        (tmp_path / "media-too" / "x.png").write_bytes(b"secret")
        (root / "out.png").symlink_to(tmp_path / "secret.png")
        (root / "up").symlink_to(tmp_path)
        (root / "ok.png").symlink_to(root / "in side" / "a%b.png")
        (root / "loop").symlink_to(root / "loop")
        os.mkfifo(root / "pipe")
        return root

    async def test_files_below_the_folder_are_read(self, uploads: Uploads, root: Path) -> None:
        made = sources(uploads, str(root))
        name = str(root / "in side" / "a%b.png").replace("%", "%25").replace(" ", "%20")
        for url in (f"file://{name}", f"file:{name}", f"file://localhost{name}", f"FILE://{root}/ok.png",
                    f"file://{root}/in%20side/../ok.png"):  # fmt: skip
            assert await made.read(part(url), "") == Sourced(b"a picture")

    @pytest.mark.parametrize(
        "name",
        ["out.png", "up/secret.png", "../secret.png", "%2e%2e/secret.png", "..%2fsecret.png", "../media-too/x.png",
         "missing.png", "loop", "pipe", "", ".", "in side", "in%20side/a%b.png%00.png", "%ff", "large.png",
         "empty.png"],
    )  # fmt: skip
    async def test_everything_else_is_refused(self, uploads: Uploads, root: Path, name: str) -> None:
        error = await refusal(sources(uploads, str(root)), part(f"file://{root}/{name}"))
        assert error.reason == {"large.png": "MEDIA_TOO_LARGE", "empty.png": "MEDIA_MALFORMED"}.get(
            name, "MEDIA_REFUSED"
        )

    async def test_other_hosts_and_other_folders_are_refused(self, uploads: Uploads, root: Path) -> None:
        made = sources(uploads, str(root))
        for url in (
            "file:///etc/passwd",
            f"file://example.com{root}/ok.png",
            "file:",
            "file://",
            "file:///proc/self/mem",
        ):
            await refusal(made, part(url))


class TestUploads:
    async def test_a_file_in_pieces_is_found_by_its_hash(self, uploads: Uploads) -> None:
        with uploads.begin() as file:
            for piece in (b"one ", b"two ", b"three"):
                file.add(piece)
            digest = file.finish(hashlib.sha256(b"one two three").digest())
        assert digest == hashlib.sha256(b"one two three").digest()
        assert await sources(uploads).read(part(digest), "") == Sourced(b"one two three", digest)
        again = Uploads(uploads._folder, 1 << 20, LIMIT)  # another process of the host
        assert again.read(digest) == b"one two three"
        assert uploads._folder.stat().st_mode & 0o777 == 0o700

    async def test_an_unknown_hash_or_name_is_told(self, uploads: Uploads) -> None:
        assert (await refusal(sources(uploads), part(bytes(32)))).reason == "MEDIA_UNKNOWN"
        assert (await refusal(sources(uploads), part("", uuid="u"))).reason == "MEDIA_UNKNOWN"

    def test_a_file_of_another_hash_too_long_or_empty_leaves_nothing(self, uploads: Uploads) -> None:
        def one(*pieces: bytes, expected: bytes | None = None) -> None:
            with uploads.begin() as file:
                for piece in pieces:
                    file.add(piece)
                file.finish(expected)

        with pytest.raises(DataLoss) as caught:
            one(b"x", expected=bytes(32))
        assert caught.value.field == "sha256"
        with pytest.raises(InvalidArgument, match="more than") as too_large:
            one(bytes(LIMIT), b"x")
        assert (too_large.value.field, too_large.value.reason) == ("data", "MEDIA_TOO_LARGE")
        with pytest.raises(InvalidArgument, match="empty"):
            one()
        with uploads.begin() as file:
            file.add(b"and then the client left")
        assert list(uploads._folder.iterdir()) == []

    async def test_one_that_is_too_large_to_be_kept_is_told_at_its_part(self, tmp_path: Path) -> None:
        small = Uploads(tmp_path / "u", 1000, LIMIT)
        error = await refusal(sources(small), part(data_url(bytes(1001)), uuid="u"))
        assert (error.reason, "without" in error.message) == ("MEDIA_TOO_LARGE", True)
        assert (await sources(small).read(part(data_url(bytes(1001))), "")).data == bytes(1001)

    def test_one_that_others_make_go_before_it_is_complete_is_told(self, tmp_path: Path) -> None:
        made = Uploads(tmp_path / "u", 1000, 600)
        with made.begin() as slow:
            slow.add(bytes(600))
            (unfinished,) = (tmp_path / "u").iterdir()
            os.utime(unfinished, (1, 1))
            made.name(b"b" * 600, "", "image", "quick")
            with pytest.raises(ResourceExhausted) as caught:
                slow.finish()
        assert caught.value.reason == "MEDIA_FULL"
        assert made.named("", "image", "quick") is not None

    def test_those_unused_for_longest_make_room(self, tmp_path: Path) -> None:
        made = Uploads(tmp_path / "u", 1000, 600)

        def keep(letter: bytes) -> bytes:
            return made.name(letter * 300, "", "image", letter.decode())

        first, second, third = keep(b"a"), keep(b"b"), keep(b"c")
        for age, digest in ((10, first), (20, second), (30, third)):
            os.utime(tmp_path / "u" / digest.hex(), (age, age))
        assert made.read(first) == b"a" * 300  # which is a use
        fourth = keep(b"d")
        assert [made.read(digest) is None for digest in (first, second, third, fourth)] == [False, True, False, False]
        assert made.named("", "image", "b") is None
        assert made.named("", "image", "a") == (b"a" * 300, first)
        held = sorted(path.name for path in (tmp_path / "u").iterdir() if not path.name.startswith("n"))
        assert held == sorted(digest.hex() for digest in (first, third, fourth))
        assert len(list((tmp_path / "u").iterdir())) == 6  # no name of what is gone

    def test_a_folder_of_somebody_else_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "u").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FailedPrecondition):
            Uploads(tmp_path / "u", 1000, 600).begin()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(FailedPrecondition):
            Uploads(tmp_path / "v", 1000, 600).begin()

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
    def test_a_full_disk_is_told(self, uploads: Uploads) -> None:
        file = uploads.begin()
        file._file.close()
        file._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        with pytest.raises(ResourceExhausted), file:
            file.add(b"x")


class TestNames:
    async def test_a_name_stands_for_what_was_sent_with_it_last(self, uploads: Uploads) -> None:
        made = sources(uploads)
        first, second = hashlib.sha256(b"one").digest(), hashlib.sha256(b"two").digest()
        assert await made.read(part(data_url(b"one"), uuid="u"), "s") == Sourced(b"one", first)
        assert await made.read(part("", uuid="u"), "s") == Sourced(b"one", first)
        await made.read(part(data_url(b"two"), uuid="u"), "s")
        assert await made.read(part("", uuid="u"), "s") == Sourced(b"two", second)

    async def test_a_name_is_known_to_its_own_salt_and_modality_alone(self, uploads: Uploads) -> None:
        made = sources(uploads)
        await made.read(part(data_url(b"one"), uuid="u"), "s")
        asked: list[Callable[[], tuple[MediaPart, str]]] = [
            lambda: (part("", uuid="u"), ""),
            lambda: (part("", uuid="u"), "t"),
            lambda: (part("", "video", uuid="u"), "s"),
            lambda: (part("", uuid="U"), "s"),
            lambda: (part("", uuid="s\0image\0u"), ""),
        ]
        for one in asked:
            assert (await refusal(made, *one())).reason == "MEDIA_UNKNOWN"

    async def test_an_upload_can_get_a_name_too(self, uploads: Uploads) -> None:
        made = sources(uploads)
        with uploads.begin() as file:
            file.add(b"a film")
            digest = file.finish()
        await made.read(part(digest, "video", uuid="film"), "")
        assert await made.read(part("", "video", uuid="film"), "") == Sourced(b"a film", digest)
