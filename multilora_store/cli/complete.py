"""Completion: the verb first, then what Hydra knows of the verb's config, and inside brackets the adapters there are.

Hydra's own completion knows no verbs and nothing inside `[`; the shell hands the typed line over in COMP_LINE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from multilora_store.cli.argv import CommandLine, parse
from multilora_store.cli.catalogue import COMMANDS
from multilora_store.errors import UsageError

__all__ = ["complete", "suggestions"]


def complete(overrides: Sequence[str]) -> int:
    """Answer `-sc install=bash`, `-sc uninstall=bash` and the shell's own `-sc query=bash`."""
    asked = [word for word in overrides if word.partition("=")[0] in {"install", "uninstall", "query"}]
    if len(asked) != 1:
        raise UsageError(
            "--shell-completion needs one of install=SHELL, uninstall=SHELL, query=SHELL",
            remedy='bash: eval "$(multilora-store -sc install=bash)"; zsh the same after: autoload -Uz bashcompinit && '
            "bashcompinit; fish: multilora-store -sc install=fish | source",
        )
    if asked[0].startswith("query="):
        found = suggestions(os.environ.get("COMP_LINE", ""))
        if found is not None:
            print("\n".join(found) if asked[0].endswith("fish") else " ".join(found))
            return 0
    _ask_hydra(asked, os.environ.get("COMP_LINE", ""))
    return 0


def suggestions(line: str) -> list[str] | None:
    """What can stand where the cursor is, or None where Hydra knows it better."""
    words = line.split()[1:]
    current = words.pop() if words and not line.endswith(" ") else ""
    bare = [word for word in words if "=" not in word and not word.startswith("-")]
    if not any(word in COMMANDS for word in bare):
        return [verb for verb in COMMANDS if verb.startswith(current)]
    command = COMMANDS[next(word for word in bare if word in COMMANDS)]
    if command.words[:1] == ("ref",) and len(bare) == 1 and "=" not in current and not current.startswith("-"):
        return [name for name in _names(_parsed(words)) if name.startswith(current)] or None
    head, bracket, inside = current.partition("[")
    if not bracket and re.match(r"['\"]?\+?adapters=", current):
        head, _, inside = current.partition("=")
        return [f"{head}={name}" for name in _names(_parsed(words)) if name.startswith(inside)]
    if bracket and head.strip("'\"").lstrip("+") == "adapters=":
        given, comma, last = inside.rpartition(",")
        taken = {item.partition("@")[0] for item in given.split(",")}
        names = [name for name in _names(_parsed(words)) if name.startswith(last) and name not in taken]
        return [f"{head}[{given}{comma}{name}" for name in names]
    return None


def _parsed(words: Sequence[str]) -> CommandLine:
    """The words before the cursor; quotes that the shell has not yet taken off are taken off."""
    return parse([word.strip("'\"") for word in words], COMMANDS)


def _names(line: CommandLine) -> list[str]:
    """Adapters in the user's config folders, and in the store that the line, the environment or the demo names."""
    from multilora_store.cli.demo import demo_overrides
    from multilora_store.cli.sources import conf_folder

    demo = bool(demo_overrides(line, COMMANDS["assemble"], line.overrides))
    folders = [*line.config_dirs, *([conf_folder() / "demo"] if demo else [])]
    files = [
        file.relative_to(folder / "adapters").with_suffix("").as_posix()
        for folder in folders
        for file in sorted((folder / "adapters").rglob("*.yaml"))
    ]
    return sorted({*files, *_stored_names(line)})


def _stored_names(line: CommandLine) -> list[str]:
    from multilora_store.errors import MultiLoRAError
    from multilora_store.storage import open_store

    given = [word.partition("=")[2] for word in line.overrides if word.startswith(("store=", "store.url="))]
    url = given[-1] if given else os.environ.get("MULTILORA_STORE", "")
    if not url or url in {"demo", "env"}:
        return []
    try:
        return list(open_store(str(Path(url).expanduser()) if "://" not in url else url).names())
    except MultiLoRAError:
        return []  # a completion has no place to say why; the command itself will


def _ask_hydra(arguments: Sequence[str], line: str) -> None:
    """Let Hydra answer for the verb's own config, the verb taken off the line."""
    from multilora_store.cli.process import through_hydra
    from multilora_store.cli.sources import register

    program, *words = line.split() or ["multilora-store"]
    verb = next((word for word in words if word in COMMANDS), None)
    open_word = bool(words) and not line.endswith(" ")
    rest = [word for word in words if word != verb]
    known = _parsed(rest[:-1] if open_word else rest)
    register(before=known.config_dirs, behind=())
    os.environ["COMP_LINE"] = " ".join([program, *rest]) + ("" if open_word else " ")
    try:
        through_hydra(["--shell-completion", *arguments], verb, lambda _: None)
    finally:
        os.environ["COMP_LINE"] = line
