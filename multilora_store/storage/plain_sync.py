"""Plain sync: between a store and a folder of plain PEFT adapters, by content as everywhere."""

from __future__ import annotations

from datetime import UTC, datetime

from multilora_store.errors import StoreNotFoundError, UsageError
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.changes import is_of_version
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.peft_dirs import PeftFolder, plan_import, refuse_rank_mismatch
from multilora_store.storage.peft_folder import Folder, read_adapter
from multilora_store.storage.puts import Source, build_contents, make_put, plan_directory
from multilora_store.storage.selection import Selection
from multilora_store.storage.state import State, Version
from multilora_store.storage.store import Store
from multilora_store.storage.sync import SyncReport
from multilora_store.storage.sync_plan import SyncPlan

__all__ = ["export_folder", "holds_adapters", "import_folder"]


def holds_adapters(blobs: Blobs) -> bool:
    """Whether plain adapters lie in a root that is no store, and not one whose first entry is yet to be written."""
    keys = [info.key for info in blobs.list()]
    return any(key.rpartition("/")[2] == CONFIG_FILE for key in keys) and not any(map(is_of_version, keys))


def import_folder(source: Blobs, target: Store, selection: Selection, *, dry_run: bool) -> SyncReport:
    """Puts every selected adapter of the folder whose content is not the target's latest, in one entry.

    Raises:
        StoreNotFoundError: the folder is no store and holds no adapters, or is a store that has no entry yet.
    """
    _refuse_partial(selection)
    folder = Folder(source.url, source)
    folders = [found for found in plan_import(_keys(source), source.url) if selection.takes(found.name)]
    read = {found.name: read_adapter(folder, found.folder, False) for found in folders}
    refuse_rank_mismatch(read)
    state = _state(target)
    versions = {name: _planned(name, one, state) for name, one in read.items()}
    fresh = {name: v for name, v in versions.items() if _latest_digest(state, name) != v.digest}
    bring = {v.digest: v for v in fresh.values() if state.holding(v.digest) is None}.values()
    seq = None
    if fresh and not dry_run:
        staged = [
            target.stage(
                name, read[name].tensors, read[name].config, files=read[name].files or None, step=read[name].step,
                metadata={"imported_from": read[name].where},
            )
            for name in fresh
        ]  # fmt: skip
        commit = target.commit(staged)
        fresh, seq = dict(commit.versions), commit.seq
    return SyncReport(
        source=source.url, target=target.url, plan=SyncPlan(puts=tuple(fresh.values())), seq=seq,
        contents=len(bring), files=3 * len(bring), nbytes=sum(v.nbytes for v in bring), dry_run=dry_run,
    )  # fmt: skip


def export_folder(source: Store, target: Blobs, selection: Selection, *, dry_run: bool) -> SyncReport:
    """Writes the latest version of every selected adapter as a plain folder; equal files are left alone.

    A plain folder knows no entries: each file is whole, but a reader may meet a new file beside an old one.
    """
    _refuse_partial(selection)
    state = source.state()
    written: list[Version] = []
    nbytes = files = 0
    for name in filter(selection.takes, state.names()):
        version = state.versions(name)[-1]
        contents = source.files.read_all(version)
        # The configuration, without which a folder is no adapter, comes last.
        missing = [f for f in (MODEL_FILE, CONFIG_FILE) if target.read(f"{name}/{f}") != contents[f]]
        for file in missing:
            files, nbytes = files + 1, nbytes + len(contents[file])
            if not dry_run:
                target.write(f"{name}/{file}", contents[file])
        if missing:
            written.append(version)
    return SyncReport(
        source=source.url, target=target.url, plan=SyncPlan(puts=tuple(written)), contents=len(written),
        files=files, nbytes=nbytes, dry_run=dry_run,
    )  # fmt: skip


def _keys(source: Blobs) -> list[str]:
    keys = [info.key for info in source.list()]
    if not any(key.rpartition("/")[2] == CONFIG_FILE for key in keys):
        raise StoreNotFoundError(
            f"{source.url} is neither a store nor a folder of adapters",
            why=f"there is no multilora-store.json and no {CONFIG_FILE}",
            remedy="check the URL for a typo",
            url=source.url,
        )
    if any(map(is_of_version, keys)):
        raise StoreNotFoundError(
            f"{source.url} is a store without an entry",
            why="its first adapters are on their way, or whoever put them was stopped",
            remedy="sync again when the put is done",
            url=source.url,
        )
    return keys


def _state(target: Store) -> State:
    try:
        return target.state()
    except StoreNotFoundError:
        return State(store_id="")


def _planned(name: str, one: PeftFolder, state: State) -> Version:
    source = Source(tensors=one.tensors, config=one.config, files=one.files or None)
    contents = build_contents(source, name)
    placed = plan_directory(state, name, contents)
    put = make_put(name, contents, placed, parents=(), metadata=None, base=None, recipe=None, step=one.step)
    return Version.from_put(put, state.seq + 1, datetime.now(UTC))


def _latest_digest(state: State, name: str) -> str:
    versions = state.versions(name)
    return versions[-1].digest if versions else ""


def _refuse_partial(selection: Selection) -> None:
    if selection.partial:
        raise UsageError(
            "a plain folder knows no snapshots and no tags",
            remedy="select by include and exclude, or sync between two stores",
        )
