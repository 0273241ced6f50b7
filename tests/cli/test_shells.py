"""Completion in the shells themselves, on a terminal, as people press the key."""

from __future__ import annotations

import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

INSTALL = 'eval "$(multilora-store -sc install=bash)"'
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], INSTALL),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit && compinit -u; " + INSTALL.replace("bash", "zsh")),
    "fish": (["fish", "--no-config", "-i"], "multilora-store -sc install=fish | source"),
}
TYPED = {
    "ass": "assemble",
    "list sto": "list store",
    "plan gran": "plan granularity=",
    "assemble shard=fsdp2 base=de": "base=demo",
    "merge merge=ties merge.params.den": "merge.params.density=",
    "gc policies=[keep_last,keep_b": "policies=[keep_last,keep_best",
    "gc 'policies=[keep_last,keep_b": "policies=[keep_last,keep_best",
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A console script of this checkout, first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "multilora-store"
    root = Path(__file__).parents[2]
    lines = (f"#!{sys.executable}", "import sys", f"sys.path.insert(0, {str(root)!r})")
    run = ("from multilora_store.__main__ import main", "sys.exit(main())")
    script.write_text("\n".join([*lines, *run]) + "\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("PS1", "> ")
    monkeypatch.setenv("HOME", str(tmp_path))
    return script


class Session:
    """A shell on a terminal of its own."""

    def __init__(self, line: list[str]) -> None:
        self.child, self.end = pty.fork()
        if self.child == 0:
            os.execvp(line[0], line)
        self.seen = ""

    @property
    def shown(self) -> str:
        """Without bells, and without the shell's own quoting."""
        return self.seen.replace("\a", "").replace("\\", "")

    def until(self, words: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.shown and time.monotonic() < deadline:
            if select.select([self.end], [], [], 0.1)[0]:
                self.seen += os.read(self.end, 65536).decode(errors="replace")
        assert words in self.shown, f"{words!r} never came: {self.seen!r}"

    def send(self, text: str) -> None:
        self.seen = ""
        os.write(self.end, text.encode())

    def close(self) -> None:
        os.close(self.end)
        os.waitpid(self.child, 0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("shell", [*SHELLS])
def test_a_key_completes_the_line(shell: str, program: Path) -> None:
    line, install = SHELLS[shell]
    if shutil.which(line[0]) is None:
        pytest.skip(f"{shell} is not installed")
    session = Session(line)
    session.send(f"{install}; echo rea''dy\n")
    session.until("ready")
    for typed, completed in TYPED.items():
        if shell == "zsh" and " policies=[" in typed:
            continue  # zsh has such a word quoted, to complete it as to run it
        session.send(f"multilora-store {typed}\t")
        session.until(completed)
        session.send("\x15")  # the line is taken back
        time.sleep(0.2)
    session.close()
