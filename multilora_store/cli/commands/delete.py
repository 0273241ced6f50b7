"""`delete`: a version, an adapter with all its versions, or a snapshot."""

from __future__ import annotations

from multilora_store.adapter import Ref
from multilora_store.cli.outcome import Outcome, counted
from multilora_store.cli.schema import DeleteOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import UsageError

__all__ = ["run"]


def run(options: DeleteOptions, terminal: Terminal) -> Outcome:
    """Delete what was named, and nothing that a tag or a snapshot still names."""
    if (options.ref is None) == (options.snapshot is None):
        raise UsageError(
            "delete needs one thing to delete",
            remedy="delete NAME@VERSION, delete NAME all=true, or delete snapshot=ID",
        )
    if options.all:
        _check_whole(options.ref)
    store = opened_store(options, terminal)
    if options.snapshot is not None:
        snapshot = store.snapshot(options.snapshot)
        store.drop_snapshot(snapshot.id)
        dropped = {"store": store.url, "deleted": {"snapshot": snapshot.id}}
        return Outcome(document=dropped, view=[f"snapshot {snapshot.id} is dropped"])
    assert options.ref is not None, "one of the two is given"
    gone = store.delete_all(options.ref) if options.all else [store.delete(options.ref)]
    left = len(store.state().versions(gone[0].name))
    view = [f"{version} is deleted; gc frees its bytes" for version in gone]
    if left:
        view.append(f"{gone[0].name} keeps {counted(left, 'other version')}")
    document = {"store": store.url, "deleted": {"versions": [str(version) for version in gone]}}
    return Outcome(document=document, view=view)


def _check_whole(ref: str | None) -> None:
    if ref is None:
        raise UsageError("all=true goes with an adapter", remedy="delete NAME all=true")
    if "@" in ref:
        raise UsageError(
            f"all=true deletes every version of an adapter, and {ref} names one",
            remedy=f"delete {ref}, or delete {Ref.parse(ref).name} all=true",
        )
