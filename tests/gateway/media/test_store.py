"""The folder of blobs: written whole, pinned, evicted; between processes too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.errors import FailedPrecondition, ResourceExhausted
from services.gateway.config import GatewaySettings
from services.gateway.media.building import blob_folder
from services.gateway.media.store import BlobStore, writing
from services.worker.blobs import default_folder

A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def _put(folder: Path, name: bytes, size: int, *, age: float = 0) -> None:
    with writing(folder, name) as file:
        file.write(bytes(size))
    stamp = time.time() - age
    os.utime(folder / name.hex(), (stamp, stamp))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_gateway_and_worker_of_one_host_meet_in_the_same_folder() -> None:
    assert blob_folder(GatewaySettings()) == default_folder()


def test_a_blob_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 1000)

    def half() -> None:
        with writing(tmp_path, A) as file:
            file.write(b"half")
            assert store.open(A) is None
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert _names(tmp_path) == set()
    _put(tmp_path, A, 10)
    with store.open(A) as blob:  # type: ignore[union-attr]
        assert blob.read() == bytes(10)


def test_a_second_writer_yields(tmp_path: Path) -> None:
    """Else the pin of the first would hold a file that has no name any more."""
    store = BlobStore(tmp_path, 5)
    _put(tmp_path, A, 10)
    pin = store.pin(A)
    assert pin is not None
    _put(tmp_path, A, 10)
    store.make_room()
    assert _names(tmp_path) == {A.hex()}
    pin.release()


def test_the_oldest_goes_first_and_no_pin_does(tmp_path: Path) -> None:
    """What is pinned does not count."""
    store = BlobStore(tmp_path, 15)
    for name, age in ((A, 30), (B, 20), (C, 10)):
        _put(tmp_path, name, 10, age=age)
    pin = store.pin(A)
    assert pin is not None
    assert pin.nbytes == 10
    store.make_room()
    assert _names(tmp_path) == {A.hex(), C.hex()}
    pin.release()
    pin.release()  # does nothing
    assert store.pinned == 0
    _put(tmp_path, B, 10)
    store.make_room()  # C has waited longest, then A
    assert _names(tmp_path) == {B.hex()}


def test_a_full_file_system_takes_no_more(tmp_path: Path) -> None:
    """What no request needs goes first, within its limit or not; then new media have to wait."""
    store = BlobStore(tmp_path, 1000, reserve_bytes=1 << 62)
    _put(tmp_path, A, 10)
    _put(tmp_path, B, 10)
    pin = store.pin(A)
    assert pin is not None
    with pytest.raises(ResourceExhausted, match="full"):
        store.make_room()
    assert _names(tmp_path) == {A.hex()}
    pin.release()


def test_pins_are_counted(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 5)
    _put(tmp_path, A, 10)
    first, second = store.pin(A), store.pin(A)
    assert first is not None
    assert second is not None
    first.release()
    store.make_room()
    assert _names(tmp_path) == {A.hex()}
    second.release()
    store.make_room()
    assert _names(tmp_path) == set()
    assert store.pin(A) is None


def test_a_pin_ends_with_its_process(tmp_path: Path) -> None:
    _put(tmp_path, A, 10)
    code = (
        "import sys, pathlib; from services.gateway.media.store import BlobStore;"
        f"pin = BlobStore(pathlib.Path({str(tmp_path)!r}), 5).pin(b'a' * 32); print(pin.nbytes, flush=True);"
        "sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == "10\n"
    store = BlobStore(tmp_path, 5)
    store.make_room()
    assert _names(tmp_path) == {A.hex()}
    other.kill()
    other.communicate()
    store.make_room()
    assert _names(tmp_path) == set()


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / f".{A.hex()}.1.tmp", tmp_path / f".{B.hex()}.2.tmp"
    for path, age in ((old, 100), (new, 0)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age, time.time() - age))
    BlobStore(tmp_path, 100).make_room()
    assert _names(tmp_path) == {new.name}


def test_folders_that_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link", "file/below"):
        with pytest.raises(FailedPrecondition, match="media_dir"):
            BlobStore(tmp_path / name, 1)
    assert (BlobStore(tmp_path / "new", 1).folder.stat().st_mode & 0o777) == 0o700
