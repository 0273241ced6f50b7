"""`restore`: a whole snapshot written out."""

from __future__ import annotations

from pathlib import Path

from multilora_store.cli.commands.export import export_one
from multilora_store.cli.documents import snapshot_document
from multilora_store.cli.outcome import Outcome, Table
from multilora_store.cli.schema import RestoreOptions
from multilora_store.cli.stores import local_path, opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import UsageError
from multilora_store.manifest import AdapterSpec, Lock, LockEntry

__all__ = ["run"]


def run(options: RestoreOptions, terminal: Terminal) -> Outcome:
    """Every adapter as a PEFT folder, `set.lock.json`, and the snapshot's own files under `snapshot/`."""
    store = opened_store(options, terminal)
    target = Path(local_path(options.target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is not an empty folder", remedy="name a new folder, or empty this one")
    snapshot = store.snapshot(options.snapshot)
    rows, entries = [], {}
    for name, member in terminal.progress(snapshot.adapters.items(), "restoring", total=len(snapshot.adapters)):
        version = store.resolve(f"{name}@{member.version}")
        rows.append((name, version.id, export_one(store, f"{name}@{version.id}", str(target / name))))
        spec = AdapterSpec(
            name=name,
            source=f"{name}@{version.id}",
            active=member.active,
            trainable=member.trainable,
            weight=member.weight,
        )
        entries[name] = LockEntry(spec=spec, version=version.id, digest=version.digest, store=store.url)
    target.mkdir(parents=True, exist_ok=True)
    lock = target / "set.lock.json"
    lock.write_text(Lock(entries=entries, snapshot=snapshot.id).to_json(), encoding="utf-8")
    files = []
    for path in store.snapshot_files(snapshot):
        place = target / "snapshot" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(store.read_snapshot_file(snapshot, path))
        files.append(str(place))
    document = {
        "store": store.url,
        "snapshot": snapshot_document(snapshot),
        "adapters": {name: path for name, _, path in rows},
        "lock": str(lock),
        "files": files,
    }
    view: list[Table | str] = [Table(columns=("adapter", "version", "folder"), rows=rows), f"lock: {lock}"]
    return Outcome(document=document, view=[*view, *(f"file: {path}" for path in files)])
