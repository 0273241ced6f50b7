"""The store as its users see it, on a local disk, in memory, and on S3."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import FaultyBlobs
from samples import CONFIG, same, tensors

from multilora_store.adapter import AdapterConfig, TensorInfo, content_digest, version_id
from multilora_store.errors import (
    ConfigError,
    ConflictError,
    DamagedError,
    ExistsError,
    NameNotAllowedError,
    NotInStoreError,
    ProtectedError,
    PurgedError,
    ReplicaIncompleteError,
    StoreNotFoundError,
    UsageError,
)
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store
from multilora_store.storage.changes import Purge
from multilora_store.storage.codec import encode

BACKENDS = ["local", "memory", pytest.param("s3", marks=pytest.mark.s3), pytest.param("s3fs", marks=pytest.mark.s3)]


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> Store:
    if request.param == "local":
        return open_store(tmp_path / "store")
    if request.param == "memory":
        return open_store(memory_url)
    pytest.importorskip("obstore" if request.param == "s3" else "s3fs")
    driver = "obstore" if request.param == "s3" else "fsspec"
    return open_store(request.getfixturevalue("s3_url"), driver=driver)


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def again(store: Store) -> Store:
    """The same store, opened anew."""
    found: Store = pickle.loads(pickle.dumps(store))
    return found


def files(store: Store) -> set[str]:
    return {info.key for info in store.blobs.list() if info.key.startswith(("adapters/", "snapshots/"))}


def test_what_is_put_is_got(store: Store) -> None:
    version = store.put(
        "team/code.style", tensors(0), CONFIG, metadata={"loss": 1.5, "title": "代码"}, tags=["best"], step=7,
        base={"name": "tiny", "revision": "r1"},
    )  # fmt: skip
    got = again(store).get("team/code.style")
    assert same(got.tensors, tensors(0))
    assert got.name == "team/code.style"
    assert got.version == version
    assert (version.metadata, version.step) == ({"loss": 1.5, "title": "代码"}, 7)
    assert version.base == {"name": "tiny", "revision": "r1"}
    assert got.config.raw == AdapterConfig.parse(CONFIG).raw | {"target_modules": ["q_proj", "v_proj"]}
    assert {name: info.shape for name, info in got.infos.items()} == {n: tuple(t.shape) for n, t in tensors(0).items()}
    assert version.directory.startswith(f"adapters/team--code.style/{version.id}-")
    assert again(store).names() == ["team/code.style"]
    assert again(store).tags("team/code.style") == {"best": version.id}
    assert store.get("team/code.style@best").version == version


def test_versions_follow_each_other(store: Store) -> None:
    made = [store.put("a", tensors(n), CONFIG, parents=["a"] if n else ()) for n in range(3)]
    assert [version.id for version in again(store).versions("a")] == [version.id for version in made]
    assert store.resolve("a") == made[2]
    assert made[2].parents == (f"a@{made[1].id}",)
    assert [entry.seq for entry in store.log()] == [1, 2, 3]


def test_a_path_is_a_peft_directory(store: Store) -> None:
    version = store.put("a", tensors(0), CONFIG)
    path = again(store).path("a")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in path.iterdir()}
    from safetensors.torch import load_file

    assert same(load_file(path / "adapter_model.safetensors"), tensors(0))
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 2
    assert store.path(version) == path


def test_a_set_is_saved_in_one_entry(store: Store) -> None:
    """Case 1: one record names every adapter of the set, and brings them all back."""
    frozen = store.put("frozen", tensors(9), CONFIG)
    draft = SnapshotDraft(
        id=store.new_snapshot_id(),
        step=100,
        adapters={
            "b": SnapshotMember(active=True, trainable=True, weight=0.7),
            "a": SnapshotMember(active=False),
            "frozen": SnapshotMember(version=frozen.id, weight=0.3),
        },
        metadata={"lr": 0.1},
    )
    store.stage_snapshot_file(draft.id, "optimizer/b.safetensors", b"state")
    staged = [pickle.loads(pickle.dumps(store.stage(name, tensors(n), CONFIG))) for n, name in enumerate("ab")]
    commit = again(store).commit(staged, snapshot=draft, tags={"b": "step-100"})
    assert commit.seq == 2
    assert len(store.log()) == 2
    snapshot = again(store).snapshot("latest")
    assert snapshot == commit.snapshot
    assert list(snapshot.adapters) == ["b", "a", "frozen"], "the order of the set is kept"
    assert snapshot.adapters["b"] == SnapshotMember(trainable=True, weight=0.7, version=commit.versions["b"].id)
    assert snapshot.adapters["frozen"].version == frozen.id
    assert (snapshot.step, snapshot.metadata) == (100, {"lr": 0.1})
    assert store.snapshot_files(snapshot) == ["optimizer/b.safetensors"]
    assert store.read_snapshot_file(snapshot, "optimizer/b.safetensors") == b"state"
    assert store.resolve("b@step-100") == commit.versions["b"]
    assert store.snapshot(snapshot.id[:12]) == snapshot
    with pytest.raises(ExistsError):
        store.commit([], snapshot=draft)


def test_equal_content_is_stored_once(store: Store) -> None:
    first = store.put("a", tensors(0), CONFIG, metadata={"n": 1})
    before = files(store)
    second = again(store).put("a", tensors(0), dict(reversed(CONFIG.items())), metadata={"n": 2})
    third = store.put("b", tensors(0), {**CONFIG, "peft_version": "9", "target_modules": ["v_proj", "q_proj"]})
    assert files(store) == before
    assert first.id == second.id == third.id
    assert first.directory == second.directory == third.directory
    assert store.resolve("a").metadata == {"n": 2}, "every put keeps its own metadata"
    assert [change.metadata for entry in store.log() for change in entry.changes] == [{"n": 1}, {"n": 2}, {}]
    assert same(store.get("b").tensors, tensors(0))


def test_putting_an_older_version_makes_it_the_latest(local: Store) -> None:
    old, new = local.put("a", tensors(0), CONFIG), local.put("a", tensors(1), CONFIG)
    assert local.resolve("a") == new
    assert local.put("a", tensors(0), CONFIG).id == old.id == local.resolve("a").id
    assert [version.id for version in local.versions("a")] == [new.id, old.id]


def test_dtypes_are_kept(local: Store) -> None:
    given = {
        name: tensor.to([torch.bfloat16, torch.float16, torch.float64, torch.float32][n % 4])
        for n, (name, tensor) in enumerate(tensors(0).items())
    }
    local.put("a", given, CONFIG)
    assert same(local.get("a").tensors, given)


def test_original_bytes_are_kept(local: Store, tmp_path: Path) -> None:
    encoded = encode(tensors(0))
    model = b"".join(bytes(part) for part in encoded.parts)
    config = b'{"r": 2, "peft_type":"LORA",\n\n "target_modules": ["v_proj", "q_proj"], "lora_alpha": 4}'
    given = {"adapter_model.safetensors": model, "adapter_config.json": config}
    kept = local.put("a", {}, AdapterConfig.parse(config), files=given)
    assert {file: (local.path("a") / file).read_bytes() for file in given} == given
    plain = {key: value for key, value in CONFIG.items() if key != "base_model_name_or_path"}
    assert local.put("b", tensors(0), plain).id == kept.id, "identity is content, not layout"


def test_refs(local: Store) -> None:
    one, two = local.put("a", tensors(1), CONFIG, tags=["best"]), local.put("a", tensors(2), CONFIG)
    assert local.resolve("a") == local.resolve("a@latest") == two
    assert local.resolve("a@best") == local.resolve(f"a@{one.id}") == local.resolve(f"a@{one.id[:7]}") == one
    for ref, message in {
        "b": "no adapter 'b'",
        "a@bset": "did you mean best",
        "a@v0000": "has no version v0000",
        "a@2001-01-01": "had no version on 2001-01-01",
    }.items():
        with pytest.raises(NotInStoreError, match=message):
            local.resolve(ref)
    with pytest.raises(LookupError):
        local.versions("b")


def test_a_date_means_the_latest_version_at_its_end(local: Store) -> None:
    one = local.put("a", tensors(1), CONFIG)
    two = local.put("a", tensors(2), CONFIG)
    day = two.time.date().isoformat()
    assert local.resolve(f"a@{day}") == two
    assert local.resolve(f"a@{one.time.isoformat()}") == one
    local.delete(f"a@{two.id}")
    assert local.resolve("a") == one
    assert local.resolve(f"a@{two.time.isoformat()}") == two, "the past stays nameable until a purge"


def test_tags_move_and_go(local: Store) -> None:
    one, two = local.put("a", tensors(1), CONFIG), local.put("a", tensors(2), CONFIG)
    local.tag(f"a@{one.id}", "best")
    assert local.resolve("a@best") == one
    local.tag("a@latest", "best")
    assert local.resolve("a@best") == two
    local.untag("a", "best")
    with pytest.raises(NotInStoreError, match="no tag 'best'"):
        local.resolve("a@best")
    with pytest.raises(NotInStoreError, match="no tag"):
        local.untag("a", "best")
    for tag in ("latest", "v1234", "2026-01-01", "no", "1e5", "", "a/b", "../x"):
        with pytest.raises(NameNotAllowedError):
            local.tag("a", tag)
        with pytest.raises(NameNotAllowedError):
            local.put("a", tensors(1), CONFIG, tags=[tag])


def test_deleting_the_latest_falls_back(local: Store) -> None:
    made = [local.put("a", tensors(n), CONFIG) for n in range(3)]
    local.delete("a")
    assert local.resolve("a") == made[1]
    local.delete(f"a@{made[0].id}")
    local.delete("a")
    assert local.names() == []
    with pytest.raises(NotInStoreError, match="all its versions were deleted"):
        local.resolve("a")
    with pytest.raises(NotInStoreError, match=r"was deleted .* by entry 5"):
        local.resolve(f"a@{made[0].id}")
    assert files(local) >= {f"{version.directory}/version.json" for version in made}
    new = local.put("a", tensors(7), CONFIG)
    assert local.versions("a") == [new]
    assert len(local.log()) == 7, "its history goes on"


def test_tags_and_snapshots_protect(local: Store) -> None:
    version = local.put("a", tensors(0), CONFIG, tags=["best"])
    draft = SnapshotDraft(id="s1", step=1, adapters={"a": SnapshotMember(version=version.id)})
    local.commit([], snapshot=draft)
    with pytest.raises(ProtectedError, match="tag best, snapshot s1"):
        local.delete("a")
    with pytest.raises(ProtectedError, match="snapshot s1"):
        local.delete("a@best")
    local.drop_snapshot("s1")
    with pytest.raises(NotInStoreError):
        local.snapshot("latest")
    with pytest.raises(ProtectedError, match="tag best"):
        local.delete("a")
    assert local.delete("a@best") == version
    assert local.names() == []


def test_all_versions_go_in_one_entry(local: Store) -> None:
    made = [local.put("a", tensors(n), CONFIG) for n in range(3)]
    other = local.put("b", tensors(9), CONFIG)
    before = len(local.log())
    assert local.delete_all("a") == made
    assert local.names() == ["b"]
    assert len(local.log()) == before + 1
    assert local.resolve("b") == other
    for version in made:
        with pytest.raises(NotInStoreError, match="was deleted"):
            local.resolve(f"a@{version.id}")
    with pytest.raises(NotInStoreError, match="no adapter 'a'"):
        local.delete_all("a")


def test_one_held_version_keeps_all(local: Store) -> None:
    made = [local.put("a", tensors(n), CONFIG) for n in range(3)]
    local.tag(f"a@{made[1].id}", "best")
    local.commit([], snapshot=SnapshotDraft(id="s1", step=1, adapters={"a": SnapshotMember(version=made[0].id)}))
    with pytest.raises(ProtectedError, match="tag best") as refused:
        local.delete_all("a")
    assert refused.value.facts["holders"] == [f"snapshot s1 ({made[0].id})", f"tag best ({made[1].id})"]
    local.untag("a", "best")
    with pytest.raises(ProtectedError, match="snapshot s1"):
        local.delete_all("a")
    assert local.versions("a") == made


def test_a_version_that_came_meanwhile_goes_too(local: Store) -> None:
    made = [local.put("a", tensors(n), CONFIG) for n in range(2)]
    other, commit = again(local), local.journal.commit

    def late(decision: Any) -> Any:
        made.append(other.put("a", tensors(7), CONFIG))
        return commit(decision)

    local.journal.commit = late  # type: ignore[method-assign]
    assert local.delete_all("a") == made
    assert again(local).names() == []


def test_a_tag_set_meanwhile_protects(local: Store) -> None:
    version = local.put("a", tensors(0), CONFIG)
    other = again(local)
    decide = local.journal.commit

    def late(decision: Any) -> Any:
        other.tag("a", "best")
        return decide(decision)

    local.journal.commit = late  # type: ignore[method-assign]
    with pytest.raises(ProtectedError, match="tag best"):
        local.delete("a")
    assert other.resolve("a") == version


def test_a_version_deleted_meanwhile_is_not_tagged(local: Store) -> None:
    version = local.put("a", tensors(0), CONFIG)
    local.put("a", tensors(1), CONFIG)
    other, commit = again(local), local.journal.commit

    def late(decision: Any) -> Any:
        other.delete(f"a@{version.id}")
        return commit(decision)

    local.journal.commit = late  # type: ignore[method-assign]
    with pytest.raises(ConflictError, match="was deleted while"):
        local.tag(f"a@{version.id}", "best")


def test_names_are_checked_inside_the_commit(local: Store) -> None:
    staged = local.stage("Team/A", tensors(0), CONFIG)
    again(local).put("team/a", tensors(1), CONFIG)
    with pytest.raises(NameNotAllowedError, match="by case only"):
        local.commit([staged])
    with pytest.raises(NameNotAllowedError, match="by case only"):
        local.commit([local.stage("x", tensors(0), CONFIG), local.stage("X", tensors(0), CONFIG)])
    assert local.names() == ["team/a"]


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "a/../b", "", ".", "a//b", "a b", "con", "no", "1e5", "a--b", "a.", "ü", "x" * 200, "latest"],
)
def test_hostile_names_write_nothing(local: Store, tmp_path: Path, name: str) -> None:
    """Cases 41, 60."""
    with pytest.raises(NameNotAllowedError):
        local.put(name, tensors(0), CONFIG)
    assert not (tmp_path / "store").exists()


def test_dotted_and_slashed_names_live_side_by_side(local: Store) -> None:
    """Case 41: the name that was given is the name that is listed."""
    names = ["org/qwen_0.6B-lora", "org/qwen_0", "mlp", "layers", "lora_A", "a", "a1", "a.1", "a/1"]
    for number, name in enumerate(names):
        local.put(name, tensors(number), CONFIG)
    assert local.names() == sorted(names)
    for number, name in enumerate(names):
        assert same(local.get(name).tensors, tensors(number))
    assert len({local.resolve(name).directory for name in names}) == len(names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "without tensors"),
        ({"a.lora_A.weight": torch.zeros(0)}, "is empty"),
        ({"a.lora_A.weight": torch.tensor([1.0, float("nan")])}, "NaN or an infinity"),
    ],
)
def test_a_bad_save_leaves_the_good_one(local: Store, given: dict[str, torch.Tensor], message: str) -> None:
    """Case 4: an adapter of empty or non-finite tensors is a hard error, and the old file is untouched."""
    version = local.put("a", tensors(0), CONFIG)
    before = files(local)
    with pytest.raises(UsageError, match=message):
        local.put("a", given, CONFIG)
    assert files(local) == before
    assert local.resolve("a") == version
    assert same(local.get("a").tensors, tensors(0))


def test_metadata_is_plain_data(local: Store) -> None:
    for bad in ({"x": object()}, {"x": float("nan")}, {1: 2}, {"x": torch.zeros(1)}):
        with pytest.raises(UsageError, match="metadata"):
            local.put("a", tensors(0), CONFIG, metadata=bad)
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"x": deep}
    with pytest.raises(UsageError, match="deep"):
        local.put("a", tensors(0), CONFIG, metadata=deep)
    with pytest.raises(UsageError, match="step"):
        local.put("a", tensors(0), CONFIG, step=-1)
    with pytest.raises(ConfigError):
        local.put("a", tensors(0), {"r": 8})
    assert local.put("a", tensors(0), CONFIG, metadata={"t": (1, 2)}).metadata == {"t": [1, 2]}


def test_a_stored_target_is_never_instantiated(local: Store, tmp_path: Path) -> None:
    """Case 59: what looks like an instruction is data."""
    marker = tmp_path / "ran"
    hostile = {"_target_": "os.system", "_args_": [f"touch {marker}"]}
    local.put("a", tensors(0), {**CONFIG, "auto_mapping": hostile}, metadata=hostile, recipe=hostile, base=hostile)
    got = local.get("a")
    assert got.version.metadata == hostile
    assert not marker.exists()


def test_no_store_is_not_an_empty_store(store: Store) -> None:
    for call in (store.names, store.log, store.snapshots, store.state, store.verify, lambda: store.get("a")):
        with pytest.raises(StoreNotFoundError, match="is not a store"):
            call()
    for call in (lambda: store.tag("a", "b"), lambda: store.delete("a"), lambda: store.untag("a", "b")):
        with pytest.raises(StoreNotFoundError):
            call()
    assert list(store.blobs.list()) == []


def test_a_set_that_cannot_be_committed_changes_nothing(local: Store) -> None:
    local.put("a", tensors(0), CONFIG)
    seq = local.state().seq
    staged = local.stage("b", tensors(1), CONFIG)
    bad = [
        (UsageError, [staged, staged], None),
        (UsageError, [staged], SnapshotDraft(id="s1", adapters={})),
        (UsageError, [staged], SnapshotDraft(id="s1", adapters={"a": SnapshotMember()})),
        (NotInStoreError, [staged], SnapshotDraft(id="s1", adapters={"a": SnapshotMember(version="v" + "0" * 16)})),
        (DamagedError, [staged], SnapshotDraft(id="../x", adapters={"b": SnapshotMember()})),
    ]
    for kind, puts, draft in bad:
        with pytest.raises(kind):
            local.commit(puts, snapshot=draft)
    with pytest.raises(UsageError, match="no put"):
        local.commit([staged], tags={"c": "best"})
    assert local.state().seq == seq


def test_snapshot_files_stay_inside(local: Store) -> None:
    for path in ("../x", "/x", "a/../../x", "", "a//b", ".hidden", "a\\b"):
        with pytest.raises(DamagedError):
            local.stage_snapshot_file("s1", path, b"x")
    with pytest.raises(DamagedError):
        local.stage_snapshot_file("../s", "x", b"x")
    record = local.stage_snapshot_file("s1", "extra/x", b"x")
    version = local.put("a", tensors(0), CONFIG)
    member = SnapshotMember(version=version.id)
    snapshot = local.commit(
        [], snapshot=SnapshotDraft(id="s1", adapters={"a": member}, files={"extra/x": record})
    ).snapshot
    local.blobs.write("snapshots/s1/extra/x", b"y")
    with pytest.raises(DamagedError, match="not what was stored"):
        local.read_snapshot_file(snapshot, "extra/x")
    local.blobs.delete(["snapshots/s1/extra/x"])
    with pytest.raises(ReplicaIncompleteError):
        local.read_snapshot_file(snapshot, "extra/x")
    with pytest.raises(NotInStoreError, match="no file"):
        local.read_snapshot_file(snapshot, "extra/z")


def test_published_vectors() -> None:
    """Ids are the same for every implementation: these vectors are part of the format."""
    vectors = json.loads((Path(__file__).parent / "vectors.json").read_text())
    assert len(vectors) >= 4
    for vector in vectors:
        config = AdapterConfig.parse(vector["config"])
        infos = [
            TensorInfo(
                name=name, dtype=row["dtype"], shape=tuple(row["shape"]),
                sha256=hashlib.sha256(bytes.fromhex(row["data_hex"])).hexdigest(),
            )
            for name, row in vector["tensors"].items()
        ]  # fmt: skip
        assert content_digest(config, infos) == vector["digest"], vector["title"]
        assert version_id(vector["digest"]) == vector["id"]
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        given = {
            name: torch.frombuffer(bytearray.fromhex(row["data_hex"]), dtype=kinds[row["dtype"]]).reshape(row["shape"])
            for name, row in vector["tensors"].items()
        }
        file = b"".join(bytes(part) for part in encode(given).parts)
        assert hashlib.sha256(file).hexdigest() == vector["file_sha256"]
        assert hashlib.sha256(config.to_json()).hexdigest() == vector["config_sha256"]


class TestPurges:
    """The rule that needs no clock: what a purge entry names never resolves, and writers look before they name it."""

    def purge(self, store: Store, *directories: str) -> None:
        store.journal.commit(lambda state: [Purge(directories=directories)])
        for directory in directories:
            store.blobs.delete([info.key for info in store.blobs.list(directory + "/")])

    def test_a_purged_version_names_the_entry(self, local: Store) -> None:
        version = local.put("a", tensors(0), CONFIG)
        local.put("a", tensors(1), CONFIG)
        local.delete(f"a@{version.id}")
        self.purge(local, version.directory)
        for ref in (f"a@{version.id}", f"a@{version.time.isoformat()}"):
            with pytest.raises(PurgedError, match="by entry 4"):
                local.get(ref)

    def test_content_that_was_purged_goes_up_again(self, local: Store) -> None:
        old = local.put("a", tensors(0), CONFIG)
        local.delete("a")
        self.purge(local, old.directory)
        new = local.put("a", tensors(0), CONFIG)
        assert new.id == old.id
        assert new.directory != old.directory
        assert same(local.get("a").tensors, tensors(0))

    def test_a_writer_overtaken_by_a_purge_uploads_again(self, local: Store) -> None:
        """It staged against a state that held the content; a delete and a purge came before its commit."""
        old = local.put("a", tensors(0), CONFIG)
        staged = local.stage("b", tensors(0), CONFIG)
        assert not staged.uploaded
        other = again(local)
        other.delete("a")
        self.purge(other, old.directory)
        version = local.commit([staged]).versions["b"]
        assert version.directory != old.directory
        assert same(again(local).get("b").tensors, tensors(0))

    def test_without_the_tensors_it_is_a_conflict(self, local: Store) -> None:
        staged = local.stage("b", tensors(0), CONFIG)
        self.purge(local, staged.put.directory)
        with pytest.raises(ConflictError, match="were purged before the commit"):
            again(local).commit([pickle.loads(pickle.dumps(staged))])

    def test_tensors_that_changed_since_are_a_conflict(self, local: Store) -> None:
        given = tensors(0)
        staged = local.stage("b", given, CONFIG)
        self.purge(local, staged.put.directory)
        next(iter(given.values())).zero_()
        with pytest.raises(ConflictError, match="have changed since"):
            local.commit([staged])


class TestCache:
    def test_one_fetch_for_many_readers(self, memory_url: str) -> None:
        """Cases 51, 114: eight threads load one adapter; it is fetched once."""
        open_store(memory_url).put("a", tensors(0), CONFIG)
        store = open_store(memory_url)
        counting = FaultyBlobs(store.blobs)
        reader = Store(counting, cache=store.files._cache)
        start, found = threading.Barrier(8), []

        def read() -> None:
            start.wait(20)
            found.append(same(reader.get("a").tensors, tensors(0)))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [True] * 8
        assert sum("adapter_model" in call for call in counting.calls) == 1
        assert not any("range" in call for call in counting.calls), "Case 115: a remote file is read in one go"

    @pytest.mark.parametrize("length", [0, 7, -1])
    def test_a_damaged_copy_is_fetched_again(self, memory_url: str, length: int) -> None:
        """Case 8: a cached copy truncated to 0, 7 and N-1 bytes."""
        store = open_store(memory_url)
        store.put("a", tensors(0), CONFIG)
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            path = store.path("a") / file
            whole = path.read_bytes()
            path.write_bytes(whole[:length])
            assert same(again(store).get("a").tensors, tensors(0))
            assert (store.path("a") / file).read_bytes() == whole

    def test_a_flipped_bit_in_a_copy_is_seen(self, memory_url: str) -> None:
        store = open_store(memory_url)
        store.put("a", tensors(0), CONFIG)
        path = store.path("a") / "adapter_model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert same(store.get("a").tensors, tensors(0))

    def test_stores_and_names_do_not_collide(self, memory_url: str) -> None:
        """Case 51: x/a_b and x_a/b are two copies; equal content of two stores is one."""
        store, other = open_store(memory_url + "1"), open_store(memory_url + "2")
        store.put("x/a_b", tensors(0), CONFIG)
        store.put("x_a/b", tensors(1), CONFIG)
        other.put("z", tensors(0), CONFIG)
        assert store.path("x/a_b") != store.path("x_a/b")
        assert store.path("x/a_b") == other.path("z")

    def test_the_cache_is_bounded(self, memory_url: str, cache: Path) -> None:
        from multilora_store.storage.cache import VersionCache

        store = open_store(memory_url)
        for number in range(6):
            store.put("a", tensors(number), CONFIG)
        size = store.resolve("a").nbytes
        small = Store(store.blobs, cache=VersionCache(limit=size * 2 + size // 2))
        paths = [small.path(version) for version in store.versions("a")]
        assert [path.is_dir() for path in paths] == [False] * 4 + [True] * 2
        assert same(small.get(store.versions("a")[0]).tensors, tensors(0))

    def test_the_bound_is_the_users(self, memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store = open_store(memory_url)
        for number in range(3):
            store.put("a", tensors(number), CONFIG)
        size = store.resolve("a").nbytes
        monkeypatch.setenv("MULTILORA_CACHE_GB", str(size * 1.5 / 1e9))
        small = open_store(memory_url)
        paths = [small.path(version) for version in store.versions("a")]
        assert [path.is_dir() for path in paths] == [False, False, True]
        monkeypatch.setenv("MULTILORA_CACHE_GB", "much")
        with pytest.raises(UsageError, match="MULTILORA_CACHE_GB"):
            open_store(memory_url)

    def test_without_a_cache_it_reads_into_memory(self, memory_url: str, cache: Path) -> None:
        store = open_store(memory_url, cache=False)
        store.put("a", tensors(0), CONFIG)
        assert same(store.get("a").tensors, tensors(0))
        assert not (cache / "versions").exists()
        with pytest.raises(UsageError, match="has no path"):
            store.path("a")

    def test_a_fetch_that_fails_leaves_nothing(self, memory_url: str, cache: Path) -> None:
        store = open_store(memory_url)
        version = store.put("a", tensors(0), CONFIG)
        store.blobs.write(f"{version.directory}/adapter_model.safetensors", b"damaged")
        with pytest.raises(DamagedError):
            store.get("a")
        assert list((cache / "versions").iterdir()) == []

    def test_two_nodes_with_their_own_disks_pull_from_the_store(
        self, memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Case 117: what one node saved, another node, which has no such files, gets from the store."""
        for node in ("one", "two"):
            monkeypatch.setenv("MULTILORA_CACHE", str(tmp_path / node))
            if node == "one":
                open_store(memory_url).put("a", tensors(0), CONFIG)
            assert open_store(memory_url).path("a").is_relative_to(tmp_path / node)


class TestDamage:
    """Whatever happens to a local store's files is found when they are read."""

    def damage(self, store: Store, file: str, change: Any) -> None:
        path = store.path("a") / file
        data = change(path.read_bytes())
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)

    @pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json", "version.json"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda data: b"",
            lambda data: data[:7],
            lambda data: data[:-1],
            lambda data: data + b" ",
            lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            lambda data: b"version https://git-lfs.github.com/spec/v1\n",
            lambda data: None,
        ],
    )
    def test_every_kind_in_every_file(self, local: Store, file: str, change: Any) -> None:
        local.put("a", tensors(0), CONFIG)
        self.damage(local, file, change)
        with pytest.raises(DamagedError) as caught:
            list(again(local).get("a").tensors.values())
        assert file in str(caught.value)
        with pytest.raises(DamagedError):
            again(local).path("a")

    def test_a_whole_local_store_is_read_only_once(self, local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """A version is hashed on its first use by this user, and not again while its files are untouched."""
        local.put("a", tensors(0), CONFIG)
        local.path("a")
        monkeypatch.setattr("multilora_store.storage.reading.check_file_hashes", lambda *_: pytest.fail("hashed again"))
        again(local).path("a")
        assert again(local).get("a").tensors._unchecked == {}
        os.utime(local.blobs.local_path(local.resolve("a").directory + "/adapter_model.safetensors"))
        assert again(local).get("a").tensors._unchecked != {}


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": "x"}, "step is 'x'"),
        ({"step": 1.5}, "step is 1.5"),
        ({"weight": float("nan")}, "no reader would take it"),
        ({"active": "yes"}, "no reader would take it"),
    ],
)
def test_nothing_is_committed_that_a_reader_would_call_damaged(local: Store, draft: dict[str, Any], told: str) -> None:
    """An entry is never rewritten, so one bad step in a snapshot would end the whole store."""
    version = local.put("a", tensors(0), CONFIG)
    step = draft.pop("step", 1)
    members = {"a": SnapshotMember(version=version.id, **draft)}
    with pytest.raises(UsageError, match=told):
        local.commit([], snapshot=SnapshotDraft(id="s1", step=step, adapters=members))
    assert again(local).resolve("a") == version
    assert [entry.seq for entry in again(local).log()] == [1]


def test_the_same_put_again_makes_no_entry(local: Store) -> None:
    """Equal content of which the same is said is there already: neither bytes nor an entry, until something is new."""
    first = local.put("a", tensors(1), CONFIG, metadata={"loss": 1}, tags=["best"])
    assert local.put("a", tensors(1), CONFIG, metadata={"loss": 1}, tags=["best"]) == first
    again = local.commit([local.stage("a", tensors(1), CONFIG, metadata={"loss": 1})])
    assert (again.new, again.seq, again.versions["a"]) == (False, 1, first)
    assert len(local.log()) == 1
    local.put("a", tensors(1), CONFIG, metadata={"loss": 2})
    local.put("a", tensors(1), CONFIG, metadata={"loss": 2}, tags=["last"])
    local.put("a", tensors(1), CONFIG, metadata={"loss": 2}, step=7)
    local.put("a", tensors(2), CONFIG)
    local.put("a", tensors(1), CONFIG, metadata={"loss": 2}, step=7)  # the latest again, which it was not
    assert [[change.verb for change in entry.changes] for entry in local.log()] == [
        ["put", "tag"], ["put"], ["tag"], ["put"], ["put"], ["put"],
    ]  # fmt: skip
    gone = local.delete("a@" + local.versions("a")[0].id)
    assert local.put("a", tensors(2), CONFIG).id == gone.id  # put anew after its deletion
    assert local.resolve("a").id == gone.id
