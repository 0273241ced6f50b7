"""The storages, each against the same suite, and what is particular to each."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest
from blobs_suite import BlobsSuite

from multilora_store.errors import (
    DamagedError,
    StorageDeniedError,
    StorageError,
    StorageFullError,
    StorageUnreachableError,
    UsageError,
)
from multilora_store.storage.blobs import Blobs, open_blobs, redact
from multilora_store.storage.failures import scrub, translate
from multilora_store.storage.fsspec_blobs import FsspecBlobs
from multilora_store.storage.local import LocalBlobs
from multilora_store.storage.memory import MemoryBlobs


class TestLocal(BlobsSuite):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return LocalBlobs(tmp_path / "root")

    def test_files_follow_the_umask(self, tmp_path: Path) -> None:
        """A store on a shared disk is readable to whom it should be; safetensors itself writes 0600."""
        blobs = LocalBlobs(tmp_path / "root")
        before = os.umask(0o027)
        try:
            blobs.write("a/b", b"x")
            blobs.create("a/c", b"x")
        finally:
            os.umask(before)
        for name in ("b", "c"):
            assert stat.S_IMODE((tmp_path / "root/a" / name).stat().st_mode) == 0o640
        assert stat.S_IMODE((tmp_path / "root/a").stat().st_mode) == 0o750

    def test_a_file_that_is_freed_as_soon_as_it_is_there_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A gc without grace beside a writer: the purge stands in the journal, and the commit finds it there."""
        blobs = LocalBlobs(tmp_path / "root")
        blobs.write("a/kept", b"x")
        replace = os.replace

        def replaced_and_freed(source: str, target: Path) -> None:
            replace(source, target)
            target.unlink()
            target.parent.rmdir()

        monkeypatch.setattr(os, "replace", replaced_and_freed)
        blobs.write("a/b/c", b"x")
        assert blobs.read("a/b/c") is None

    def test_files_that_count_together_are_all_there_or_none_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Filled first, flushed then, named last, in the given order; a failure on the way leaves nothing."""
        blobs = LocalBlobs(tmp_path / "root")
        steps: list[str] = []
        fsync, replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", lambda fd: (steps.append("flush"), fsync(fd)))
        monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(f"name {Path(b).name}"), replace(a, b)))
        blobs.write_many([("a/b/model", b"m" * 100), ("a/b/config", [b"c", b"d"]), ("a/b/record", b"")])
        assert steps == [*["flush"] * 3, "name model", "name config", "name record", *["flush"] * 4]
        assert (blobs.read("a/b/model"), blobs.read("a/b/config"), blobs.read("a/b/record")) == (b"m" * 100, b"cd", b"")

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageFullError):
            blobs.write_many([("a/c/model", b"m"), ("a/c/config", b"c")])
        assert list((tmp_path / "root/a/c").iterdir()) == []

    def test_nothing_but_the_files_is_left(self, tmp_path: Path) -> None:
        blobs = LocalBlobs(tmp_path / "root")
        blobs.write("a/b", b"x")
        blobs.create("a/c", b"x")
        blobs.create("a/c", b"y")
        assert sorted(path.name for path in (tmp_path / "root/a").iterdir()) == ["b", "c"]
        blobs.delete(["a/b", "a/c"])
        assert list((tmp_path / "root").iterdir()) == []

    def test_symbolic_links_do_not_lead_out(self, tmp_path: Path) -> None:
        """Case 60: a link out of the root is refused for reading, writing and listing."""
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        root = tmp_path / "root"
        root.mkdir()
        (root / "folder").symlink_to(outside)
        (root / "file").symlink_to(outside / "secret")
        (root / "dangling").symlink_to(outside / "new")
        blobs = LocalBlobs(root)
        for key in ("folder/secret", "file", "folder/new", "dangling"):
            for call in (blobs.read, blobs.stat, lambda k: blobs.write(k, b"x"), lambda k: blobs.create(k, b"x")):
                with pytest.raises(DamagedError, match="leaves the store's root"):
                    call(key)
            with pytest.raises(DamagedError):
                blobs.delete([key])
        with pytest.raises(DamagedError):
            list(blobs.list("folder/"))
        assert list(blobs.list()) == []
        assert [path.name for path in outside.iterdir()] == ["secret"]
        assert (outside / "secret").read_bytes() == b"secret"

    def test_the_root_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        LocalBlobs(tmp_path / "link").write("a/b", b"x")
        assert (tmp_path / "real/a/b").read_bytes() == b"x"

    def test_a_full_disk_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blobs = LocalBlobs(tmp_path / "root")
        blobs.write("a", b"old")

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        for call in (lambda: blobs.write("a", b"new"), lambda: blobs.create("b", b"new")):
            with pytest.raises(StorageFullError) as caught:
                call()
            assert "free space" in caught.value.remedy
        monkeypatch.undo()
        assert [path.name for path in (tmp_path / "root").iterdir()] == ["a"]
        assert blobs.read("a") == b"old"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_read_only_folder_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir(mode=0o500)
        with pytest.raises(StorageDeniedError, match=str(tmp_path / "root")):
            LocalBlobs(tmp_path / "root").write("a", b"x")

    def test_without_hard_links_creation_is_exclusive_and_torn_files_are_seen(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_links(*_: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
        blobs = LocalBlobs(tmp_path / "root")
        assert blobs.create("j/1.json", b'{"a": 1}') is True
        assert blobs.create("j/1.json", b"other") is False
        assert blobs.read("j/1.json") == b'{"a": 1}'
        path = tmp_path / "root/j/1.json"
        whole = path.read_bytes()
        path.write_bytes(whole[:-3])
        timer = threading.Timer(0.3, path.write_bytes, [whole])
        timer.start()
        assert blobs.read("j/1.json") == b'{"a": 1}', "a writer that is at work is waited for"
        timer.join()
        path.write_bytes(whole[:-3])
        with pytest.raises(DamagedError, match="not whole"):
            blobs.read("j/1.json")

    def test_processes_racing_to_create_have_one_winner(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        won = context.Queue()

        def attempt(number: int) -> None:
            blobs = LocalBlobs(tmp_path / "root")
            won.put([key for key in range(100) if blobs.create(f"r/{key}", str(number).encode())])

        workers = [context.Process(target=attempt, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        winners = sorted(key for _ in workers for key in won.get(timeout=60))
        for worker in workers:
            worker.join(60)
        assert winners == list(range(100))


class TestMemory(BlobsSuite):
    @pytest.fixture
    def blobs(self, memory_url: str) -> Blobs:
        return MemoryBlobs(memory_url)

    def test_it_is_the_memory_of_fsspec(self, memory_url: str) -> None:
        import fsspec

        MemoryBlobs(memory_url).write("a/b", b"x")
        with fsspec.open(f"{memory_url}/a/b") as file:
            assert file.read() == b"x"


class TestOtherFileSystem(BlobsSuite):
    """A file system without exclusive creation of its own: fsspec's local one."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return FsspecBlobs(f"file://{tmp_path}/root")

    def test_racing_creates_have_one_winner(self, blobs: Blobs) -> None:
        """It does not hold here, and the storage says so."""
        assert blobs.exclusive == "absent"


@pytest.mark.s3
class TestObjectStore(BlobsSuite):
    @pytest.fixture
    def blobs(self, s3_url: str) -> Blobs:
        pytest.importorskip("obstore")
        return open_blobs(s3_url, driver="obstore")

    def test_a_missing_bucket_is_named(self, s3_url: str) -> None:
        pytest.importorskip("obstore")
        blobs = open_blobs("s3://no-such-bucket-here/x", driver="obstore", retries=0)
        with pytest.raises(StorageError, match="no-such-bucket-here"):
            blobs.write("a", b"x")

    def test_it_works_in_a_forked_worker(self, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
        """Case 48: no hang after a fork; fsspec answers there, and where it is not installed, an error does."""
        blobs.write("a", b"x")
        pytest.importorskip("s3fs")
        assert _in_child(blobs) == "b'x'"
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert _in_child(blobs) == "StorageUnreachableError"


@pytest.mark.s3
class TestS3ThroughFsspec(BlobsSuite):
    @pytest.fixture
    def blobs(self, s3_url: str) -> Blobs:
        pytest.importorskip("s3fs")
        return open_blobs(s3_url, driver="fsspec")

    def test_it_works_in_a_forked_worker(self, blobs: Blobs) -> None:
        """Case 48."""
        blobs.write("a", b"x")
        assert _in_child(blobs) == "b'x'"


def _in_child(blobs: Blobs) -> str:
    context = multiprocessing.get_context("fork")
    answer = context.Queue()

    def child() -> None:
        try:
            answer.put(repr(blobs.read("a")))
        except Exception as error:
            answer.put(type(error).__name__)

    worker = context.Process(target=child)
    worker.start()
    found = answer.get(timeout=60)
    worker.join(30)
    return str(found)


def test_an_unreachable_endpoint_is_named_and_soon() -> None:
    pytest.importorskip("obstore")
    blobs = open_blobs(
        "s3://bucket/x", endpoint_url="http://127.0.0.1:9", retries=0, timeout=2, region="us-east-1", anon=True
    )
    with pytest.raises(StorageUnreachableError) as caught:
        blobs.read("a")
    assert "s3://bucket/x/a" in str(caught.value)
    assert "endpoint" in caught.value.remedy


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("", {}, "empty"),
        ("nosuch://x", {}, "no storage"),
        ("file://", {}, "names no folder"),
        ("/tmp/x", {"endpoint_url": "http://x"}, "no storage options"),
        ("memory://x", {"anon": True}, "no storage options"),
        ("s3://b/x", {"driver": "boto"}, "unknown storage driver"),
        ("s3://b/x", {"driver": "obstore", "secret": "hunter2"}, "unknown storage options"),
        ("s3://b/x", {"driver": "fsspec", "secret": "hunter2"}, "credentials .* were given as options"),
    ],
)
def test_unusable_urls_and_options(url: str, options: dict[str, object], message: str) -> None:
    if options.get("driver") == "obstore":
        pytest.importorskip("obstore")
    with pytest.raises(UsageError, match=message) as caught:
        open_blobs(url, **options).read("a")
    assert "hunter2" not in str(caught.value)


def test_secrets_are_never_printed() -> None:
    assert redact("s3://key:secret@bucket/x?token=abc#f") == "s3://bucket/x"
    assert redact("/plain/path") == "/plain/path"
    for text in (
        "failed https://user:pw@host/x",
        "aws_secret_access_key=AKIAabc/def",
        "'SecretAccessKey': 'AKIAabc/def'",
        "X-Amz-Signature=AKIAabc/def&x=1",
        "Authorization: Bearer AKIAabc/def",
        "session_token: AKIAabc/def",
    ):
        assert "AKIAabc" not in scrub(text), text
        assert "pw@" not in scrub(text)
    error = translate(ValueError("secret_key='AKIAabc'"), "reading", "s3://b/x")
    assert "AKIAabc" not in str(error)
    assert "secret" not in redact("az://account:secret@c/x")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), StorageFullError),
        (OSError(errno.EDQUOT, "quota"), StorageFullError),
        (OSError(errno.EROFS, "read-only"), StorageDeniedError),
        (PermissionError(errno.EACCES, "no"), StorageDeniedError),
        (RuntimeError("An error occurred (ExpiredToken)"), StorageDeniedError),
        (ConnectionResetError("Connection reset by peer"), StorageUnreachableError),
        (TimeoutError("timed out"), StorageUnreachableError),
        (RuntimeError("503 SlowDown: Please reduce your request rate."), StorageUnreachableError),
        (RuntimeError("NoSuchBucket: the bucket does not exist"), StorageUnreachableError),
        (RuntimeError("something else"), StorageError),
    ],
)
def test_failures_are_typed_with_a_remedy(raised: Exception, kind: type[StorageError]) -> None:
    """Case 114 and its like: whatever a driver raises comes out typed."""
    error = translate(raised, "reading", "s3://b/x")
    assert type(error) is kind
    assert error.remedy
    assert "s3://b/x" in error.what


def test_a_driver_s_dump_of_itself_is_left_out() -> None:
    raised = OSError('Error performing PUT http://h/k: refused  Debug source: Generic { store: "S3", source: Retry }')
    found = translate(raised, "reading", "s3://bucket/x")
    assert found.why == "OSError: Error performing PUT http://h/k: refused"
