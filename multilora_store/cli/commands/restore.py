"""`restore`: a whole snapshot written out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from multilora_store.adapter import Ref
from multilora_store.cli.commands.export import export_one
from multilora_store.cli.documents import jsonable, snapshot_document
from multilora_store.cli.outcome import Outcome, Table, short
from multilora_store.cli.schema import RestoreOptions
from multilora_store.cli.stores import local_path, opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import UsageError

if TYPE_CHECKING:
    from multilora_store.storage.diff import StateDiff

__all__ = ["run"]

LOCK = "set.lock.json"


def run(options: RestoreOptions, terminal: Terminal) -> Outcome:
    """Every adapter as a PEFT folder, `set.lock.json`, and the snapshot's own files under `snapshot/`."""
    if (options.target is None) == (options.to is None):
        raise UsageError(
            "restore needs either a folder to write or a past state to bring back",
            remedy="restore ./out snapshot=latest, or restore to=2026-11-30",
        )
    if options.to is not None:
        return _state_of(options.to, options, terminal)
    from multilora_store.assembly.resolve import lock_snapshot
    from multilora_store.storage.locations import check_new_folder, new_folder
    from multilora_store.storage.progress import Meter

    assert options.target is not None, "one of the two is given"
    store = opened_store(options, terminal)
    target = Path(local_path(options.target))
    check_new_folder(target)
    snapshot = store.snapshot(options.snapshot)
    locked = lock_snapshot(store, snapshot.id)
    rows, files = [], []
    versions = {name: store.resolve(f"{name}@{member.version}") for name, member in snapshot.adapters.items()}
    sizes = [version.nbytes for version in versions.values()] + [file.size for file in snapshot.files.values()]
    with terminal.progress("restoring") as progress, new_folder(target) as folder:
        meter = Meter(progress, files=len(sizes), nbytes=sum(sizes))
        for name, version in versions.items():
            piece = meter.piece(version.nbytes)
            export_one(store, f"{name}@{version.id}", str(folder / name), progress=piece.follow)
            rows.append((name, version.id, str(target / name)))
            piece.done()
        for path in store.snapshot_files(snapshot):
            place = folder / "snapshot" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(store.read_snapshot_file(snapshot, path))
            files.append(str(target / "snapshot" / path))
            meter.add(snapshot.files[path].size)
        (folder / LOCK).write_text(locked.to_json(), encoding="utf-8")
    document = {
        "store": store.url,
        "snapshot": snapshot_document(snapshot),
        "adapters": {name: path for name, _, path in rows},
        "lock": str(target / LOCK),
        "files": files,
    }
    view: list[Table | str] = [Table(columns=("adapter", "version", "folder"), rows=rows), f"lock: {target / LOCK}"]
    return Outcome(document=document, view=[*view, *(f"file: {path}" for path in files)])


def _state_of(to: str, options: RestoreOptions, terminal: Terminal) -> Outcome:
    """Make the state after an entry, or at a moment, the present one: by a new entry, never by rewriting."""
    from multilora_store.storage import restore_state

    moment = int(to) if to.isdecimal() else Ref(name="any", selector=to).moment
    if moment is None:
        raise UsageError(f"to={to}: neither the number of an entry nor a date", remedy="log shows entries and times")
    store = opened_store(options, terminal)
    report = restore_state(store, moment, adapters=options.adapters, exact=options.exact, dry_run=options.dry_run)
    diff = report.diff
    found = {"diff": diff.to_json(), "seq": report.seq, "dry_run": report.dry_run}
    verb = "would be" if options.dry_run else "is"
    lines = _differences(diff)
    view = [*(lines or ["nothing differs"]), f"the state of {to} {verb} the present one"]
    return Outcome(document={"store": store.url, **jsonable(found)}, view=view)


def _differences(diff: StateDiff) -> list[str]:
    """One line for every latest version, tag, version and snapshot that is not what it was."""
    lines: list[str] = []
    for name, change in diff.adapters.items():
        if change.latest:
            lines.append(f"{name}: latest {_arrow(change.latest)}")
        lines += [f"{name}: tag {tag} {_arrow(pair)}" for tag, pair in change.tags.items()]
        lines += [f"{name}@{short(version)} back" for version in change.put]
        lines += [f"{name}@{short(version)} gone" for version in change.gone]
    lines += [f"snapshot {name} back" for name in diff.taken]
    return [*lines, *(f"snapshot {name} gone" for name in diff.dropped)]


def _arrow(pair: tuple[str | None, str | None]) -> str:
    return f"{short(pair[0])} -> {short(pair[1])}"
