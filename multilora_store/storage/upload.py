"""Upload: what one sync has brought to its target so far, however often it has to decide again."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from multilora_store.errors import StorageError
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.progress import Listener
from multilora_store.storage.records import dump
from multilora_store.storage.state import State, Version
from multilora_store.storage.sync_plan import SyncPlan
from multilora_store.storage.transfer import Transfer, bound_directory

__all__ = ["Upload"]

log = logging.getLogger(__name__)


class Upload:
    """Copies what a plan needs; asked again, it copies only what is new or was purged meanwhile.

    While it is at work, `sync/<source>.json` lies in the target. If a sync finds it there, an earlier one was
    killed (or another is at work), and a listing shows which files need not be sent again.

    Attributes:
        contents: Versions whose files were brought.
    """

    def __init__(
        self,
        source: Blobs,
        target: Blobs,
        source_id: str,
        *,
        jobs: int,
        bandwidth: float | None,
        progress: Listener | None,
    ) -> None:
        self._target, self._note = target, f"sync/{source_id}.json"
        self._transfer = Transfer(source, target, jobs=jobs, bandwidth=bandwidth, progress=progress)
        self._placed: dict[str, tuple[str, str, int]] = {}
        self._snapshots: set[str] = set()
        self._noted = False

    @property
    def contents(self) -> int:
        return len(self._placed)

    @property
    def files(self) -> int:
        """Files that are there now, sent or found."""
        return self._transfer.files

    @property
    def nbytes(self) -> int:
        return self._transfer.nbytes

    @property
    def resumed(self) -> int:
        """Files that an earlier sync had sent."""
        return self._transfer.resumed

    def bring(self, plan: SyncPlan, theirs: State) -> None:
        """Copies the contents and the files of snapshots that `plan` needs and the target has not."""
        versions: dict[str, Version] = {}
        for version in plan.contents(theirs):
            placed = self._placed.get(version.digest)
            if placed is None or placed[0] in theirs.purged:
                directory = bound_directory(theirs, version)
                versions[directory] = version
                self._placed[version.digest] = (directory, version.record, version.nbytes)
        snapshots = [s for s in plan.snapshots if s.id not in self._snapshots and s.files]
        if versions or snapshots:
            if not self._noted:
                self._transfer.present = self._take_note()
            self._transfer.run(versions, snapshots)
            self._snapshots.update(snapshot.id for snapshot in snapshots)

    def place(self, version: Version, theirs: State) -> tuple[str, str, int]:
        """Where the content of `version` lies in the target: directory, record's SHA-256, bytes."""
        held = theirs.holding(version.digest)
        return (held.directory, held.record, held.nbytes) if held else self._placed[version.digest]

    def finish(self) -> None:
        """Takes the note away; one that stays costs the next sync a listing."""
        if not self._noted:
            return
        try:
            self._target.delete([self._note])
        except StorageError as error:
            log.debug("the note of a finished sync stays: %s", error.what)

    def _take_note(self) -> Mapping[str, int]:
        """Sizes by key of what lies in the target, if an earlier sync did not finish; and notes this one."""
        left: dict[str, int] = {}
        if self._target.read(self._note) is not None:
            left = {info.key: info.size for root in ("adapters/", "snapshots/") for info in self._target.list(root)}
        self._target.write(self._note, dump({"format": 1}))
        self._noted = True
        return left
