"""Copies inside one service: the bytes of an adapter do not come here, unless the service refuses."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxying import Proxy, proxied
from samples import CONFIG, same, tensors

from multilora_store.errors import StorageError
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store, sync

pytestmark = pytest.mark.s3


@pytest.fixture
def watched(s3_endpoint: str) -> Iterator[str]:
    with proxied(s3_endpoint) as endpoint:
        yield endpoint


WIDTH = 10_000
LARGE = 4 * 2 * WIDTH * 4
"""Bytes of the tensors of one adapter, next to which all else is small."""


def fill(store: Store) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        store.put(name, tensors(seed, width=WIDTH, layers=1), CONFIG)
    record = store.stage_snapshot_file("s1", "optimizer/a.safetensors", b"m" * LARGE)
    draft = SnapshotDraft(
        id="s1",
        adapters={"a": SnapshotMember(version=store.resolve("a").id)},
        files={"optimizer/a.safetensors": record},
    )
    store.commit([], snapshot=draft)


def check(target: Store) -> None:
    assert same(target.get("a").tensors, tensors(1, width=WIDTH, layers=1))
    assert target.read_snapshot_file(target.snapshot(), "optimizer/a.safetensors") == b"m" * LARGE
    assert target.verify().ok


def other_bucket(s3_endpoint: str, url: str) -> str:
    bucket = url.split("/")[2] + "x"
    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT"), timeout=10).close()
    return f"s3://{bucket}/copy"


@pytest.mark.parametrize("driver", ["obstore", pytest.param("fsspec", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bucket", ["one", "two"])
def test_a_service_copies_by_itself(driver: str, bucket: str, s3_url: str, s3_endpoint: str, watched: str) -> None:
    """Three large files, each one copy and one look at its size; none of their bytes passes here."""
    pytest.importorskip("s3fs" if driver == "fsspec" or bucket == "two" else "obstore")
    target = s3_url + "-copy" if bucket == "one" else other_bucket(s3_endpoint, s3_url)
    source, copy = (open_store(url, endpoint_url=watched, driver=driver) for url in (s3_url, target))
    fill(source)
    Proxy.seen.clear()
    report = sync(source, copy)
    copies = [size for _, is_copy, size in Proxy.seen if is_copy]
    assert len(copies) == 3
    assert sum(size for *_, size in Proxy.seen) < LARGE
    assert report.files == 2 * 3 + 1
    assert report.nbytes > 3 * LARGE
    check(open_store(target, endpoint_url=s3_endpoint, driver=driver, cache=False))
    assert sync(source, copy).unchanged


@pytest.mark.parametrize("driver", ["obstore", pytest.param("fsspec", marks=pytest.mark.slow)])
def test_what_a_service_refuses_to_copy_is_sent(driver: str, s3_url: str, watched: str) -> None:
    pytest.importorskip("s3fs" if driver == "fsspec" else "obstore")
    source, copy = (open_store(url, endpoint_url=watched, driver=driver, retries=1) for url in (s3_url, s3_url + "-c"))
    fill(source)
    Proxy.refuse_copies = True
    Proxy.seen.clear()
    sync(source, copy, jobs=1)
    assert len({size for _, is_copy, size in Proxy.seen if is_copy}) == 1, "refused once, not asked for each file"
    assert sum(size for *_, size in Proxy.seen) > 6 * LARGE
    check(open_store(s3_url + "-c", endpoint_url=watched, driver=driver, cache=False))


def test_two_services_are_not_taken_for_one(s3_url: str, s3_endpoint: str, watched: str, tmp_path: Path) -> None:
    source = open_store(s3_url, endpoint_url=s3_endpoint)
    fill(source)
    target = open_store(s3_url + "-c", endpoint_url=watched)
    sync(source, target)
    assert not any(is_copy for _, is_copy, _ in Proxy.seen)
    check(target)


def test_a_large_file_goes_up_in_parts_and_whole(
    s3_url: str, watched: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is a request of its own; a part that is refused leaves nothing, and the next sync sends it again."""
    pytest.importorskip("obstore")
    monkeypatch.setattr("multilora_store.storage.object_blobs._CHUNK", 1 << 20)
    source = open_store(tmp_path / "run")
    source.put("a", tensors(1, width=160_000, layers=1), CONFIG)
    target = open_store(s3_url, endpoint_url=watched, retries=0)
    Proxy.refuse_parts = True
    with pytest.raises(StorageError):
        sync(source, target)
    assert open_store(s3_url).state().seq == 0
    assert not any(info.key.endswith(".safetensors") for info in open_store(s3_url).blobs.list("adapters/"))
    Proxy.refuse_parts = False
    Proxy.seen.clear()
    sync(source, target)
    parts = [size for method, _, size in Proxy.seen if method == "PUT" and size > 1 << 18]
    assert len(parts) == 5
    assert max(parts) < 2 << 20
    assert same(open_store(s3_url, cache=False).get("a").tensors, tensors(1, width=160_000, layers=1))
