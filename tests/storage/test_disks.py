"""Real disks that refuse: full, mounted read-only, taken away. Typed errors, and nothing that was there is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import CONFIG, same, tensors

from multilora_store.errors import StorageDeniedError, StorageError, StorageFullError, StoreError, StoreNotFoundError
from multilora_store.storage import open_store, sync


def _mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)):
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_the_old_state_and_works_again_when_there_is_room(small_disk: Path) -> None:
    """Case 48: put, sync and snapshot files fail in words; readers are served all the while."""
    store = open_store(small_disk / "store")
    store.put("a", tensors(1), CONFIG)
    (small_disk / "ballast").write_bytes(b"x" * (3 << 20))
    large = tensors(2, width=60_000)
    for attempt in (
        lambda: store.put("b", large, CONFIG),
        lambda: store.stage_snapshot_file("s1", "state.json", b"x" * (2 << 20)),
        lambda: sync(_filled(small_disk.parent / "other", large), store),
    ):
        with pytest.raises(StorageFullError, match="failed at") as caught:
            attempt()
        assert "free space" in caught.value.remedy
        assert same(open_store(small_disk / "store").get("a").tensors, tensors(1))
        assert store.names() == ["a"]
    left = [path for path in (small_disk / "store").rglob("*") if path.name.startswith(".tmp~")]
    assert left == []
    (small_disk / "ballast").unlink()
    store.put("b", tensors(2), CONFIG)
    assert store.verify().ok


def _filled(root: Path, given: dict[str, object]) -> Path:
    open_store(root).put("b", given, CONFIG)  # type: ignore[arg-type]
    return root


def test_a_disk_without_room_for_an_entry_keeps_the_old_state(small_disk: Path) -> None:
    """Not a byte is left when the entry is to be made: the commit fails as a whole, and no entry is torn."""
    store = open_store(small_disk / "store")
    version = store.put("a", tensors(1), CONFIG)
    room = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(b"x" * (room.f_bavail * room.f_frsize))
    with pytest.raises(StorageFullError):
        store.tag("a", "best")
    assert open_store(small_disk / "store").resolve("a") == version
    assert open_store(small_disk / "store").tags("a") == {}
    (small_disk / "ballast").unlink()
    store.tag("a", "best")
    assert store.verify().ok


def test_a_read_only_disk_is_read_and_refused_in_words(small_disk: Path, tmp_path: Path) -> None:
    """Reading, verifying and syncing from it work; every way of writing is one typed error, and nothing changes."""
    root = small_disk / "store"
    store = open_store(root)
    version = store.put("a", tensors(1), CONFIG)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    if not _mount("-o", "remount,ro", str(small_disk)):
        pytest.skip("remounting is not permitted here")
    frozen = open_store(root)
    assert same(frozen.get("a").tensors, tensors(1))
    assert frozen.path("a").is_dir()
    assert frozen.verify().ok
    assert sync(root, tmp_path / "copy").contents == 1
    for attempt in (
        lambda: frozen.put("b", tensors(2), CONFIG), lambda: frozen.tag("a", "best"), lambda: frozen.delete("a"),
        lambda: sync(_filled(tmp_path / "other", tensors(3)), root), lambda: store.put("b", tensors(2), CONFIG),
    ):  # fmt: skip
        with pytest.raises(StorageDeniedError) as caught:
            attempt()
        assert "read-only" in caught.value.remedy
    with pytest.raises(StorageDeniedError):
        open_store(small_disk / "new").put("a", tensors(1), CONFIG)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert _mount("-o", "remount,rw", str(small_disk))
    assert store.put("b", tensors(2), CONFIG).seq == 2
    assert store.resolve("a") == version


def test_a_disk_that_goes_away_is_no_empty_store(small_disk: Path) -> None:
    """What appears under an unmounted disk is another folder: neither read as a store nor written in its place."""
    store = open_store(small_disk / "store")
    store.put("a", tensors(1), CONFIG)
    subprocess.run(["umount", "-l", str(small_disk)], check=True)
    assert _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small_disk))
    with pytest.raises(StoreError):
        store.get("a")
    with pytest.raises(StoreNotFoundError):
        open_store(small_disk / "store").names()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put("a", tensors(1), CONFIG)
    (tmp_path / "store/journal").chmod(0o500)
    try:
        with pytest.raises(StorageDeniedError):
            store.put("b", tensors(2), CONFIG)
        assert open_store(tmp_path / "store").names() == ["a"]
    finally:
        (tmp_path / "store/journal").chmod(0o700)


def test_a_store_that_is_removed_under_a_writer_is_an_error(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put("a", tensors(1), CONFIG)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreError):
        store.get("a")
    with pytest.raises((StorageError, StoreError)):
        open_store(tmp_path / "store").delete("a")
