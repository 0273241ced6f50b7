"""Completion: the verb first, then what Hydra knows of the verb's config, and inside brackets the choices there are.

Hydra's own completion knows no verbs, no short forms and nothing inside `[`; the shell hands the typed line over in
COMP_LINE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from multilora_store.cli.argv import CommandLine, parse
from multilora_store.cli.catalogue import COMMANDS, Command
from multilora_store.cli.options import options_of
from multilora_store.errors import MultiLoRAError, UsageError

if TYPE_CHECKING:
    from multilora_store.plugins import Registry

__all__ = ["complete", "suggestions"]

_ZSH: Final = r"""
_multilora_store() {
  local -a found
  found=(${(f)"$(COMP_LINE="$LBUFFER" multilora-store -sc query=fish 2>/dev/null)"})
  compadd -U -S '' -- ${found#[\'\"]}
}
compdef _multilora_store multilora-store
"""
"""Hydra has zsh go through bash's completion, which stops at brackets."""
_INNER: Final = ("demo/", "hydra", "options=")
"""Groups that are not for users: offered to who types their first letter."""


def complete(overrides: Sequence[str]) -> int:
    """Answer `-sc install=bash`, `-sc uninstall=bash` and the shell's own `-sc query=bash`."""
    asked = [word for word in overrides if word.partition("=")[0] in {"install", "uninstall", "query"}]
    if len(asked) != 1:
        raise UsageError(
            "--shell-completion needs one of install=SHELL, uninstall=SHELL, query=SHELL",
            remedy='bash, zsh: eval "$(multilora-store -sc install=bash)", or zsh, where compinit has run; '
            "fish: multilora-store -sc install=fish | source",
        )
    if asked[0].endswith("=zsh"):
        print(_ZSH.strip() if asked[0].startswith("install") else "compdef -d multilora-store")
        return 0
    if asked[0].startswith("query="):
        found = suggestions(os.environ.get("COMP_LINE", ""))
        if found is not None:
            print("\n".join(found) if asked[0].endswith("fish") else " ".join(found))
            return 0
    _ask_hydra(asked[0], os.environ.get("COMP_LINE", ""))
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
    key = head.strip("'\"").lstrip("+")
    if not bracket and re.match(r"['\"]?\+?adapters=", current):
        head, _, inside = current.partition("=")
        return [f"{head}={name}" for name in _names(_parsed(words)) if name.startswith(inside)]
    if bracket and key.endswith("="):
        given, comma, last = inside.rpartition(",")
        taken = {item.partition("@")[0] for item in given.split(",")}
        names = [name for name in _listed(key[:-1], words, command) if name.startswith(last) and name not in taken]
        return [f"{head}[{given}{comma}{name}" for name in names]
    if "steps" in command.schema.__dataclass_fields__ and re.fullmatch(r"steps\.\w*=?\w*", current):
        return [word for word in _steps(_registry(words, command), current) if word.startswith(current)]
    return _values(current, command)


def _values(current: str, command: Command) -> list[str] | None:
    """The values of an option that has but a few."""
    key, equals, value = current.partition("=")
    kinds = {option.key: option.type for option in options_of(command.schema)} if equals else {}
    valid = ["true", "false"] if kinds.get(key) == "bool" else kinds.get(key, "").split("|")
    return [f"{key}={one}" for one in valid if one.startswith(value)] if len(valid) > 1 else None


def _listed(group: str, words: Sequence[str], command: Command) -> list[str]:
    """What may stand in the list of a group of which several are chosen."""
    from multilora_store.cli.choices import GROUPS

    if group == "adapters":
        return _names(_parsed(words))
    if group not in GROUPS or not GROUPS[group].several or group not in command.schema.__dataclass_fields__:
        return []
    return list(_registry(words, command).names(GROUPS[group].kind))


def _steps(registry: Registry, current: str) -> list[str]:
    """The places of an assembly, or what can be chosen for the one that is named."""
    place, equals, _ = current.partition("=")
    if equals:
        return [f"{place}={name}" for name in registry.names("assembly_step")]
    steps = [item.name for item in registry.all() if (item.kind, item.origin) == ("assembly_step", "built-in")]
    return [f"steps.{where}{step}=" for where in ("", "before_", "after_") for step in steps]


def _registry(words: Sequence[str], command: Command) -> Registry:
    """The plugins, with those drop-ins that the line names and that can be loaded."""
    from multilora_store.cli.plugins import load_plugins
    from multilora_store.plugins import default_registry

    line = _parsed(words)
    try:
        return load_plugins(_prepared(line), line.config_dirs, line.config_name or command.name)
    except MultiLoRAError:
        return default_registry()  # a completion has no place to say why; the command itself will


def _prepared(line: CommandLine) -> list[str]:
    """The overrides as Hydra takes them; as typed where they are not whole yet."""
    from multilora_store.cli.overrides import prepare

    try:
        return prepare(line.overrides, text_keys=(), multirun=True, own_set=True)
    except MultiLoRAError:
        return list(line.overrides)


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
    from multilora_store.storage import open_store

    given = [word.partition("=")[2] for word in line.overrides if word.startswith(("store=", "store.url="))]
    url = given[-1] if given else os.environ.get("MULTILORA_STORE", "")
    if not url or url in {"demo", "env"}:
        return []
    try:
        return list(open_store(str(Path(url).expanduser()) if "://" not in url else url).names())
    except MultiLoRAError:
        return []  # a completion has no place to say why; the command itself will


def _ask_hydra(asked: str, line: str) -> None:
    """Let Hydra answer for the verb's own config, the verb taken off the line."""
    from multilora_store.cli.process import through_hydra
    from multilora_store.cli.sources import register

    program, *words = line.split() or ["multilora-store"]
    verb = next((word for word in words if word in COMMANDS), "assemble")
    current = words.pop() if words and not line.endswith(" ") else ""
    known = _parsed(words)
    _registry(words, COMMANDS[verb])
    register(before=known.config_dirs, behind=())
    overrides = [word for word in _prepared(known) if not re.search(r"\s", word)]  # Hydra parts the line at blanks
    os.environ["COMP_LINE"] = " ".join([program, *known.flags, *overrides, current])
    told = StringIO()
    try:
        with redirect_stdout(told):
            through_hydra(["--shell-completion", asked], verb, lambda _: None)
    finally:
        os.environ["COMP_LINE"] = line
    if not asked.startswith("query="):
        print(told.getvalue(), end="")
        return
    found = [word for word in told.getvalue().split() if current or not word.startswith(_INNER)]
    print("\n".join(found) if asked.endswith("fish") else " ".join(found))
