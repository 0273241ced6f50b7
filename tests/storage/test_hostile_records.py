"""Records are data from somebody: every field of every record, with hostile values, stays inside the root."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import CONFIG, tensors

from multilora_store.errors import DamagedError, MultiLoRAError, NotInStoreError, StoreFormatError
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store
from multilora_store.storage.changes import Delete, Import, Origin, Purge, Tag
from multilora_store.storage.entries import Entry
from multilora_store.storage.marker import Marker
from multilora_store.storage.records import DEEPEST, Fields, parse, sha256
from multilora_store.storage.state import State

HOSTILE: list[Any] = [
    None, True, 0, -1, 2**80, 1.5, "", "x", "../../etc/passwd", "/etc/passwd", "a/../../b", "\x00", "ü", "x" * 100_000,
    "v0000000000000000", "adapters/../../x/v0000000000000000-aaaaaa", "adapters/a/v0000000000000000-../../x",
    "2026-01-01", [], ["x"], [None], {}, {"x": 1}, {"_target_": "os.system"}, [[[[]]]],
]  # fmt: skip


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths(item, (*at, index))


def replaced(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    found = copy.deepcopy(document)
    holder = found
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    return found


def removed(document: Any, at: tuple[Any, ...]) -> Any:
    found = copy.deepcopy(document)
    holder = found
    for key in at[:-1]:
        holder = holder[key]
    del holder[at[-1]]
    return found


def renamed(document: Any, at: tuple[Any, ...], key: str) -> Any:
    found = copy.deepcopy(document)
    holder = found
    for step in at[:-1]:
        holder = holder[step]
    holder[key] = holder.pop(at[-1])
    return found


def variants(document: Any) -> Iterator[Any]:
    """The document with each place replaced by each hostile value, removed, or renamed."""
    for at in paths(document):
        for value in HOSTILE:
            yield replaced(document, at, value)
        if at and isinstance(at[-1], str):
            yield removed(document, at)
            for key in ("../x", "/x", "", "ü", "no"):
                yield renamed(document, at, key)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "root" / "store")
    version = store.put("team/a", tensors(0), CONFIG, tags=["best"], metadata={"x": 1}, recipe={"y": 2}, step=3)
    record = store.stage_snapshot_file("s1", "extra/x", b"x")
    member = SnapshotMember(version=version.id, weight=0.5)
    draft = SnapshotDraft(id="s1", step=1, adapters={"team/a": member}, files={"extra/x": record})
    store.commit([], snapshot=draft)
    origin = Origin(store="0" * 8, seq=4, digest="0" * 64)
    store.journal.commit(
        lambda state: [
            Import(origin=origin, changes=(Tag(name="team/a", tag="imported", id=version.id),)),
            Delete(name="team/a", id="v" + "0" * 16),
            Purge(directories=("adapters/team--a/v0000000000000000-aaaaaa",)),
        ]
    )
    return store


def use(store: Store) -> None:
    """Everything that follows what records say."""
    state = store.state()
    for name in state.names():
        for version in state.versions(name):
            got = store.get(version)
            list(got.tensors.values())
            store.path(version)
    for snapshot in store.snapshots():
        for file in store.snapshot_files(snapshot):
            store.read_snapshot_file(snapshot, file)
    store.verify()
    store.put("new", tensors(5), CONFIG)


def test_every_field_of_every_entry(store: Store, tmp_path: Path) -> None:
    """Case 60: a typed error, or an entry that is right; never another exception, never a file outside."""
    refused = accepted = 0
    for seq in range(1, 4):
        key = f"journal/{seq:08d}.json"
        for variant in variants(json.loads(store.blobs.read(key))):
            try:
                entry = Entry.from_bytes(json.dumps(variant).encode(), key, seq)
            except (DamagedError, StoreFormatError):
                refused += 1
                continue
            accepted += 1
            for change in entry.changes:
                text = json.dumps(change.to_json())
                for field in ("directory", "directories", "name", "tag"):
                    value = getattr(change, field, "")
                    for one in [value] if isinstance(value, str) else value:
                        assert ".." not in one.split("/")
                        assert not one.startswith("/")
                assert len(text) < 200_000
    assert refused > 1500
    assert accepted > 100


def test_every_field_of_a_checkpoint(store: Store) -> None:
    refused = accepted = 0
    for variant in variants(json.loads(store.state().to_bytes())):
        try:
            state = State.from_bytes(json.dumps(variant).encode(), "checkpoint")
        except (DamagedError, StoreFormatError):
            refused += 1
            continue
        accepted += 1
        for directory in [*state.directories(), *state.purged]:
            assert ".." not in directory.split("/")
            assert directory.startswith(("adapters/", "snapshots/"))
        for name in state.names():
            assert state.adapters[name].latest is not None
            assert set(state.adapters[name].tags.values()) <= set(state.adapters[name].versions)
    assert refused > 1000
    assert accepted > 100


def test_every_field_of_a_version_record_and_marker(store: Store, tmp_path: Path) -> None:
    """A hostile record is refused before it is used: its digest stands in the journal."""
    version = store.resolve("team/a")
    key = f"{version.directory}/version.json"
    good = store.blobs.read(key)
    generator = random.Random(0)
    chosen = list(variants(json.loads(good)))
    for variant in generator.sample(chosen, 150):
        data = json.dumps(variant).encode()
        store.blobs.write(key, data)
        with pytest.raises(DamagedError, match=r"version\.json"):
            store.get("team/a")
    for variant in chosen:
        from multilora_store.storage.contents import VersionRecord

        try:
            VersionRecord.from_bytes(json.dumps(variant).encode(), key)
        except (DamagedError, StoreFormatError):
            continue
    store.blobs.write(key, good)
    marker = json.loads(store.journal.marker.to_bytes())
    for variant in variants(marker):
        try:
            Marker.from_bytes(json.dumps(variant).encode(), "marker")
        except (DamagedError, StoreFormatError):
            continue
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["store"]


def test_a_hostile_newest_entry_stops_the_store_in_words(store: Store, tmp_path: Path) -> None:
    """The whole store, driven over hostile entries that follow the history rightly."""
    state = store.state()
    put = json.loads(store.blobs.read("journal/00000001.json"))["changes"][0]
    frame = {"seq": 4, "prev": state.digest, "writer": "w", "time": "2026-12-01T00:00:00Z", "needs": []}
    outside = tmp_path / "outside"
    outside.mkdir()
    generator = random.Random(1)
    chosen = generator.sample(list(variants({**frame, "changes": [put]})), 120)
    refused = 0
    for variant in chosen:
        store.blobs.write("journal/00000004.json", json.dumps(variant).encode())
        fresh = open_store(tmp_path / "root" / "store")
        try:
            use(fresh)
        except MultiLoRAError:
            refused += 1
        store.blobs.delete([f"journal/{n:08d}.json" for n in range(4, 10)])
    assert refused > 60
    assert list(outside.iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["store"]


def test_an_entry_that_names_foreign_files_finds_no_version(store: Store, tmp_path: Path) -> None:
    """A well-formed put of content that is not there: nothing resolves to other bytes."""
    state = store.state()
    digest = "0" * 64
    directory = f"adapters/team--a/v{'0' * 16}-aaaaab"
    change = {
        "change": "put", "name": "evil", "id": f"v{'0' * 16}", "sha256": digest, "directory": directory,
        "record": sha256(b"x"), "nbytes": 1, "metadata": {}, "parents": [],
    }  # fmt: skip
    entry = {"seq": 4, "prev": state.digest, "writer": "w", "time": "2026-12-01T00:00:00Z", "changes": [change]}
    store.blobs.write("journal/00000004.json", json.dumps(entry).encode())
    with pytest.raises(DamagedError, match=r"version\.json is missing"):
        store.get("evil")
    with pytest.raises(NotInStoreError):
        store.get("nobody")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff\xfe", b"[]", b"1", b"null", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":Infinity}',
        b'{"a":' * 200_000, b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"a":1}x',
        "{\"a\":\"\ud800\"}".encode("utf-8", "surrogatepass"),
    ],
)  # fmt: skip
def test_what_is_no_record(data: bytes) -> None:
    with pytest.raises(DamagedError, match="the record here is damaged"):
        parse(data, "here")


def test_size_and_depth_are_limited() -> None:
    with pytest.raises(DamagedError, match="at most 10"):
        parse(b'{"a": "0123456789"}', "here", largest=10)
    deep: dict[str, Any] = {}
    for _ in range(DEEPEST + 1):
        deep = {"x": deep}
    with pytest.raises(DamagedError, match="deep"):
        Fields({"metadata": deep}, "here").free("metadata")


def test_mutated_entries_are_refused_or_right(store: Store) -> None:
    """Flipped, dropped and doubled bytes: a typed error or an entry, and bounded memory."""
    generator = random.Random(2)
    data = store.blobs.read("journal/00000002.json")
    for _ in range(3000):
        mutated = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(mutated))
            how = generator.randrange(3)
            if how == 0:
                mutated[at] ^= 1 << generator.randrange(8)
            elif how == 1:
                del mutated[at : at + generator.randint(1, 20)]
            else:
                mutated[at:at] = mutated[at : at + generator.randint(1, 20)]
        try:
            Entry.from_bytes(bytes(mutated), "journal/00000002.json", 2)
        except (DamagedError, StoreFormatError):
            continue
