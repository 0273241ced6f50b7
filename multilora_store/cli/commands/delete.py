"""`delete`: an adapter, a version or a snapshot."""

from __future__ import annotations

from multilora_store.cli.outcome import Outcome
from multilora_store.cli.schema import DeleteOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import UsageError

__all__ = ["run"]


def run(options: DeleteOptions, terminal: Terminal) -> Outcome:
    """Delete what was named, and nothing that a tag or a snapshot still names."""
    if (options.ref is None) == (options.snapshot is None):
        raise UsageError(
            "delete needs one thing to delete", remedy="delete NAME, delete NAME@VERSION, or delete snapshot=ID"
        )
    store = opened_store(options, terminal)
    if options.snapshot is not None:
        snapshot = store.snapshot(options.snapshot)
        store.drop_snapshot(snapshot.id)
        document = {"store": store.url, "deleted": {"snapshot": snapshot.id}}
        return Outcome(document=document, view=[f"snapshot {snapshot.id} is dropped"])
    assert options.ref is not None, "one of the two is given"
    before = store.state()
    store.delete(options.ref)
    after = store.state()
    gone = [
        f"{version.name}@{version.id}"
        for version in before.live()
        if version.id not in {item.id for item in after.versions(version.name)}
    ]
    return Outcome(
        document={"store": store.url, "deleted": {"versions": gone}},
        view=[f"{name} is deleted; gc frees its bytes" for name in gone],
    )
