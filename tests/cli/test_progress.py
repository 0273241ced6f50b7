"""Progress on a terminal: pieces, bytes, rate and time left for all that can last; nothing at all elsewhere."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from multilora_store import export_adapter, import_peft, open_store, sync
from multilora_store.assembly import assemble
from multilora_store.assembly.bases import demo_base
from multilora_store.cli import main
from multilora_store.integrations.inspection import inspect_checkpoint
from multilora_store.merging import diff
from multilora_store.storage import SnapshotDraft, SnapshotMember
from multilora_store.storage.progress import Progress

Run = Callable[[str], Any]

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LINES = {
    "verify": ["verifying"],
    "import {folder} again": ["importing"],
    "export '*' {out}/all": ["exporting"],
    "export b {out}/merged kind=merged base=hf base.path={base}": ["merging"],
    "merge '+adapters=[a,b]' merge=linear merge.into=ab": ["merging"],
    "assemble '+adapters=[a,b]' base=demo save=true": ["assembling", "saving"],
    "restore {out}/restored": ["restoring"],
    "repair": ["repairing"],
    "sync {store} {out}/copy": ["syncing"],
    "diff a b": ["comparing"],
    "doctor {folder}": ["looking"],
    "path a store={remote}": ["fetching"],
    "gc grace_hours=0 store={out}/copy": ["collecting"],
}


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A pseudo-terminal of 80 columns as stderr; gives a list that holds what was drawn in the end."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    drawn: list[str] = []

    def read() -> None:
        found = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            found += piece
        drawn.append(found.decode())

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, os.fdopen(theirs, "w") as stream:
        patch.setattr(sys, "stderr", stream)
        yield drawn
    reader.join()
    os.close(ours)


@pytest.fixture
def spelled(store: str, base_folder: Path, here: Path) -> Callable[[str], str]:
    """Puts the places into a command line: a store with a snapshot, a PEFT folder, a base, a folder to be made."""
    opened = open_store(store)
    members = {name: SnapshotMember(version=opened.resolve(name).id) for name in ("a", "b")}
    opened.commit([], snapshot=SnapshotDraft(id=opened.new_snapshot_id(), step=3, adapters=members))
    export_adapter(opened, "b", here.parent / "folder")
    remote = f"memory://{uuid4().hex}"
    sync(store, remote)
    places = {"folder": here.parent / "folder", "out": here / "out", "base": base_folder, "store": store}
    places["remote"] = remote
    return lambda line: line.format(**places) + ("" if re.search(r"^sync|store=", line) else f" store={store}")


def test_a_terminal_is_told_how_far_it_is(spelled: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    for line, labels in LINES.items():
        if line.startswith("gc"):
            open_store(Path.cwd() / "out" / "copy").delete_all("team/zh")
        with terminal(monkeypatch) as drawn:
            assert main(shlex.split(spelled(line))) in (0, 3), line
        frames = [frame for frame in re.split(r"[\r\n]+", ESCAPE.sub("", drawn[0])) if frame.strip()]
        for label in labels:
            last = [frame for frame in frames if frame.startswith(label)][-1]
            assert re.search(r" ([1-9]\d*)/\1 ", last), (line, last)  # every piece
            assert re.search(r" ([\d.]+)/\1 (bytes|kB|MB)", last), (line, last)  # every byte
            assert re.search(r"\d (bytes|kB|MB)/s|\?", last), (line, last)  # a rate, once there are two pieces
            assert re.search(r"\d:\d\d:\d\d", last), (line, last)
        assert max(map(len, frames)) <= 80
        assert drawn[0].endswith("\x1b[2K"), "the bar is wiped"


@pytest.mark.parametrize(
    ("line", "label", "pieces"),
    [("report", "reading headers", 3), ("plan '+adapters=[a,b]' base=demo world_size=4", "planning", 2)],
)
def test_what_has_no_bytes_counts_pieces(
    line: str, label: str, pieces: int, spelled: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as drawn:
        assert main(shlex.split(spelled(line))) == 0
    last = [frame for frame in re.split(r"[\r\n]+", ESCAPE.sub("", drawn[0])) if frame.strip()][-1]
    assert re.fullmatch(rf"{label} \S+ {pieces}/{pieces} \d:\d\d:\d\d\s*", last)


def test_parts_of_one_adapter_are_told(
    spelled: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One large file never jumps from nothing to all."""
    monkeypatch.setattr("multilora_store.storage.blobs.PIECE", 4096)
    monkeypatch.setattr("multilora_store.storage.blobs._RANGE", 4096)
    opened, remote = open_store(spelled("{store}").split()[0]), open_store(spelled("{remote}").split()[0])
    stored = opened.get("a")
    fresh = {"name": "fresh", "tensors": stored.tensors, "config": stored.config}
    works: dict[str, Callable[[Any], Any]] = {
        "verify": lambda tell: opened.verify("a", progress=tell),
        "path": lambda tell: remote.path("a", progress=tell),
        "assemble": lambda tell: assemble(demo_base(), {"a": {}}, store=opened, progress=tell),
        "diff": lambda tell: diff(opened, "a", "b", progress=tell),
        "put": lambda tell: open_store(tmp_path / "put").stage_many([fresh], progress=tell),
        "put elsewhere": lambda tell: open_store("memory://put-elsewhere").stage_many([fresh], progress=tell),
        "sync up": lambda tell: sync(opened, "memory://sync-up", include=["a"], progress=tell),
        "sync down": lambda tell: sync(remote, tmp_path / "down", include=["a"], progress=tell),
        "export up": lambda tell: export_adapter(opened, "a", "memory://export-up", progress=tell),
        "export down": lambda tell: export_adapter(remote, "a", tmp_path / "export", progress=tell),
        "doctor": lambda tell: inspect_checkpoint(spelled("{folder}").split()[0], progress=tell),
    }
    for work, do in works.items():
        told: list[Progress] = []
        do(told.append)
        amounts = [now.nbytes for now in told]
        assert len(set(amounts)) > 4, work
        assert amounts == sorted(amounts), work
        assert (told[-1].nbytes, told[-1].files) == (told[-1].nbytes_total, told[-1].files_total), work

    told = []
    import_peft(open_store("memory://imported"), "memory://export-up", name="a", progress=told.append)
    read = [now.nbytes for now in told[: 1 + [now.files for now in told].index(1)]]  # and then stored
    assert len(set(read)) > 4
    assert read == sorted(read)


@pytest.mark.parametrize("word", ["quiet=true", "output=json"])
def test_who_wants_none_gets_none(word: str, spelled: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as drawn:
        assert main(shlex.split(spelled(f"verify {word}"))) == 0
    assert drawn == [""]


def test_a_pipe_gets_none(run: Run, spelled: Callable[[str], str]) -> None:
    for line in ("verify", "export b {out}"):
        result = run(spelled(line))
        assert (result.code, result.err) == (0, "")
        assert "\x1b" not in result.out
