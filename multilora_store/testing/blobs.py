"""What every storage must keep: one class, which the test of each storage fills with a way to open it."""

from __future__ import annotations

import pickle
import threading
from datetime import UTC, datetime, timedelta

import pytest

from multilora_store.errors import NameNotAllowedError
from multilora_store.storage.blobs import Blobs

__all__ = ["HOSTILE", "BlobsSuite"]

HOSTILE = ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "a\\b", "a\x00b", "a b", "ä", "a" * 2000]


class BlobsSuite:
    """Subclasses give `blobs` as a fixture."""

    def test_an_absent_key_is_an_answer(self, blobs: Blobs) -> None:
        assert blobs.read("a/b") is None
        assert blobs.read_range("a/b", 0, 4) is None
        assert blobs.stat("a/b") is None
        assert list(blobs.list("a/")) == []
        assert list(blobs.list()) == []
        blobs.delete(["a/b", "c"])

    def test_what_is_written_is_read(self, blobs: Blobs) -> None:
        blobs.write("a/b.json", b"first")
        blobs.write("a/b.json", [b"sec", bytearray(b"on"), memoryview(b"d")])
        assert blobs.read("a/b.json") == b"second"
        info = blobs.stat("a/b.json")
        assert info is not None
        assert (info.key, info.size) == ("a/b.json", 6)
        assert abs(datetime.now(UTC) - info.mtime) < timedelta(minutes=5)

    def test_an_empty_blob_is_not_an_absent_one(self, blobs: Blobs) -> None:
        blobs.write("empty", b"")
        assert blobs.read("empty") == b""
        assert blobs.create("empty", b"x") is False
        assert blobs.create("made-empty", b"") is True
        assert blobs.create("made-empty", b"x") is False
        assert blobs.read("made-empty") == b""

    def test_ranges(self, blobs: Blobs) -> None:
        blobs.write("a", bytes(range(100)))
        assert blobs.read_range("a", 10, 5) == bytes(range(10, 15))
        assert blobs.read_range("a", 95, 50) == bytes(range(95, 100))
        assert blobs.read_range("a", 0, 100) == bytes(range(100))
        assert blobs.read_range("a", 200, 5) == b""

    def test_create_leaves_what_is_there(self, blobs: Blobs) -> None:
        assert blobs.create("j/1.json", b"one") is True
        assert blobs.create("j/1.json", b"two") is False
        assert blobs.read("j/1.json") == b"one"
        blobs.delete(["j/1.json"])
        assert blobs.create("j/1.json", b"two") is True
        assert blobs.read("j/1.json") == b"two"

    def test_racing_creates_have_one_winner(self, blobs: Blobs) -> None:
        """Case 69: however many believe that they are the one writer, one is."""
        for number in range(10):
            start, won = threading.Barrier(8), []

            def attempt(body: bytes, key: str = f"race/{number}") -> None:
                start.wait(20)  # noqa: B023
                if blobs.create(key, body):
                    won.append(body)  # noqa: B023

            threads = [threading.Thread(target=attempt, args=(bytes([65 + i]) * 1000,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert [blobs.read(f"race/{number}")] == won

    def test_list_is_recursive_exact_and_fresh(self, blobs: Blobs) -> None:
        """Case 45: a listing is never served from a cache."""
        for key in ("a/x/1", "a/x/2", "a/y", "ab", "b"):
            blobs.write(key, key.encode())
        assert sorted(info.key for info in blobs.list("a/")) == ["a/x/1", "a/x/2", "a/y"]
        assert sorted(info.key for info in blobs.list()) == ["a/x/1", "a/x/2", "a/y", "ab", "b"]
        assert {info.key: info.size for info in blobs.list("a/x/")} == {"a/x/1": 5, "a/x/2": 5}
        blobs.write("a/x/3", b"longer than it was")
        blobs.delete(["a/x/1"])
        assert sorted(info.key for info in blobs.list("a/x/")) == ["a/x/2", "a/x/3"]

    def test_two_clients_see_each_other(self, blobs: Blobs) -> None:
        """Case 45: B lists, A writes, B reads."""
        other = pickle.loads(pickle.dumps(blobs)) if hasattr(blobs, "__getstate__") else blobs  # noqa: S301  (its own bytes)
        assert list(other.list("n/")) == []
        assert other.stat("n/new") is None
        blobs.write("n/new", b"1")
        assert other.read("n/new") == b"1"
        blobs.write("n/new", b"longer")
        info = other.stat("n/new")
        assert info is not None
        assert info.size == 6
        assert [found.key for found in other.list("n/")] == ["n/new"]

    @pytest.mark.parametrize("key", HOSTILE)
    def test_no_key_leaves_the_root(self, blobs: Blobs, key: str) -> None:
        """Case 60."""
        with pytest.raises(NameNotAllowedError):
            blobs.read(key)
        with pytest.raises(NameNotAllowedError):
            blobs.write(key, b"x")
        with pytest.raises(NameNotAllowedError):
            blobs.create(key, b"x")
        with pytest.raises(NameNotAllowedError):
            blobs.delete([key])
        with pytest.raises(NameNotAllowedError):
            blobs.local_path(key)

    def test_large_blobs_in_pieces(self, blobs: Blobs) -> None:
        piece = bytes(range(256)) * 4096
        blobs.write("large", [piece] * 9)
        assert blobs.read("large") == piece * 9
        assert blobs.read_range("large", len(piece) - 2, 4) == b"\xfe\xff\x00\x01"
