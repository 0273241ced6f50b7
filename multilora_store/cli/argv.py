"""The command line as typed: the verb, the flags, the overrides, in any order."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from multilora_store.adapter import source_kind
from multilora_store.errors import UsageError, choices

__all__ = ["CommandLine", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What was typed, taken apart.

    Attributes:
        verb: The command, or None where none was given.
        words: Bare words behind the verb (`show a@best`), in order.
        overrides: What holds `key=` or deletes (`~key`), in order, untouched.
        flags: Hydra's own flags, to be put before the overrides.
        config_dirs: Folders of the user's own configs, the first found wins; taken off the flags.
        config_name: Another primary config than the verb's.
        help, version, completion, multirun: Which special action was asked for.
        shows: Hydra only shows something (`--cfg`, `--info`, `--hydra-help`); nothing runs.
    """

    verb: str | None
    words: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    config_name: str | None = None
    help: bool = False
    version: bool = False
    completion: bool = False
    multirun: bool = False
    shows: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"command line: {message}", remedy="see --help, and --hydra-help for Hydra's own flags")


def _parser() -> argparse.ArgumentParser:
    """Hydra's flags, `--config-dir` many times over, and a version of our own."""
    parser = _Parser(prog="multilora_store", add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--package", "-p")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--experimental-rerun")
    parser.add_argument(
        "--info",
        "-i",
        nargs="?",
        const="all",
        choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
    )
    for names in (
        ("--help", "-h"),
        ("--hydra-help",),
        ("--version",),
        ("--resolve",),
        ("--run", "-r"),
        ("--multirun", "-m"),
        ("--shell-completion", "-sc"),
    ):
        parser.add_argument(*names, action="store_true")
    return parser


def _flags(known: argparse.Namespace) -> tuple[str, ...]:
    """The flags that Hydra shall see, rebuilt."""
    flags: list[str] = []
    for name, flag in (("resolve", "--resolve"), ("run", "--run"), ("multirun", "--multirun")):
        flags += [flag] if getattr(known, name) else []
    for name, flag in (("shell_completion", "--shell-completion"), ("hydra_help", "--hydra-help")):
        flags += [flag] if getattr(known, name) else []
    for name, flag in (("package", "--package"), ("cfg", "--cfg"), ("info", "--info")):
        value = getattr(known, name)
        flags += [flag, value] if value is not None else []
    return tuple(flags)


def _is_override(word: str) -> bool:
    """A key is no path and no URL: `kohya://FILE#component=unet` is a bare word for all its `=`."""
    key, equals, _ = word.partition("=")
    return (bool(equals) or word.startswith("~")) and source_kind(key) == "ref"


def parse(argv: Sequence[str], verbs: Collection[str]) -> CommandLine:
    """Take the command line apart.

    Args:
        argv: Without the program's name.
        verbs: The commands that exist.

    Raises:
        UsageError: an unknown flag, an unknown or missing command, a folder of configs that is not there.
    """
    known = _parser().parse_intermixed_args(list(argv))
    if known.experimental_rerun:
        raise UsageError("--experimental-rerun unpickles a file, which this program never does")
    bare = [word for word in known.words if not _is_override(word)]
    if known.shell_completion:  # here the words are Hydra's (`query=bash`), the line itself is in the environment
        bare = []
    verb = bare.pop(0) if bare else None
    if verb is not None and verb not in verbs:
        raise UsageError(f"unknown command {verb!r}", remedy=choices(verb, verbs, noun="command"), verb=verb)
    folders = [*known.config_dir, *([known.config_path] if known.config_path else [])]
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(
                f"the folder of configs {str(Path(folder).absolute())!r} is not there",
                remedy="--config-dir takes a folder that holds e.g. adapters/a.yaml",
            )
    return CommandLine(
        verb=verb,
        words=tuple(bare),
        overrides=tuple(word for word in known.words if _is_override(word)),
        flags=_flags(known),
        config_dirs=tuple(Path(folder).absolute() for folder in folders),
        config_name=known.config_name,
        help=known.help,
        version=known.version,
        completion=known.shell_completion,
        multirun=known.multirun,
        shows=bool(known.cfg or known.info or known.hydra_help),
    )
