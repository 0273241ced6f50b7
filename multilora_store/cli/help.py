"""The help: examples first, then the command's own options with type, default and one line; no torch, no store."""

from __future__ import annotations

import textwrap
from pathlib import Path

from multilora_store.cli.argv import CommandLine
from multilora_store.cli.catalogue import COMMANDS, Command
from multilora_store.cli.choices import GROUPS, parameters_of
from multilora_store.cli.options import Option, options_of
from multilora_store.cli.overrides import chosen, prepare
from multilora_store.cli.plugins import load_plugins
from multilora_store.cli.schema import AdapterEntry
from multilora_store.cli.sources import conf_folder
from multilora_store.cli.summaries import config_summary, plugin_summary
from multilora_store.plugins import Parameter, Registry

__all__ = ["help_text"]

_PROGRAM = "multilora-store"
_WIDTH = 80


def help_text(line: CommandLine) -> str:
    """What `--help` prints for the whole program, or for the command on the line."""
    if line.verb is None:
        return _overview()
    overrides = prepare(line.overrides, text_keys=(), multirun=line.multirun)
    registry = load_plugins(overrides, line.config_dirs, line.verb)
    return _command(COMMANDS[line.verb], registry, overrides, line.config_dirs)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "Keeps a whole set of LoRA adapters on any storage, and rebuilds the set before the FSDP wrap.",
        "",
        f"usage: {_PROGRAM} COMMAND [key=value ...] [flags]      (or: python -m multilora_store)",
        "",
        f"  {_PROGRAM} assemble '+adapters=[a,b]'",
        f"  {_PROGRAM} list store.url=s3://bucket/run7",
        "  torchrun --nproc-per-node 2 -m multilora_store assemble '+adapters=[a,b]' shard=fsdp2",
        "",
        "commands:",
    ]
    for command in COMMANDS.values():
        lines += _hanging(f"  {command.name:<{width}}  ", command.summary)
    lines += ["", *_flags(), "", f"{_PROGRAM} COMMAND --help shows a command's options."]
    return "\n".join(lines)


def _command(command: Command, registry: Registry, overrides: list[str], folders: tuple[Path, ...]) -> str:
    options = options_of(command.schema)
    required = {option.key for option in options if option.default == "required"}
    words = "".join(f" {word.upper()}" if word in required else f" [{word.upper()}]" for word in command.words)
    lines = [f"{command.name}: {command.summary}", "", "examples:"]
    lines += [
        f"  {example}" if example.startswith("vllm") else f"  {_PROGRAM} {example}" for example in command.examples
    ]
    lines += ["", f"usage: {_PROGRAM} {command.name}{words} [key=value ...] [flags]", "", "options:"]
    lines += _options(options)
    if any((option.key, option.type) == ("adapters", "mapping") for option in options):
        lines += ["", "each adapter (adapters.NAME.FIELD=...):", *_options(options_of(AdapterEntry))]
    for spelled, names in _choices(command, registry, folders).items():
        lines += ["", f"{spelled}, NAME is one of:"]
        width = min(max(map(len, names)), 24)
        for name, summary in names.items():
            lines += _hanging(f"  {name:<{width}}  ", summary)
    lines += _chosen_plugins(command, registry, overrides)
    lines += ["", *_flags()]
    return "\n".join(lines)


def _options(options: list[Option]) -> list[str]:
    lines = []
    for option in options:
        head = f"  {option.key}  {option.type}, {option.default}"
        lines += _hanging(f"{head:<38}  ", option.doc, indent=40)
    return lines


def _choices(command: Command, registry: Registry, folders: tuple[Path, ...]) -> dict[str, dict[str, str]]:
    """How each group of the command is chosen -> its choices, each with what it says of itself."""
    found: dict[str, dict[str, str]] = {}
    for group in (*GROUPS, "shard", "store", "adapters"):
        if group not in command.schema.__dataclass_fields__:
            continue
        files = [file for folder in (conf_folder(), *folders) for file in (folder / group).glob("*.yaml")]
        names = {file.stem: config_summary(file) for file in files}
        if group in GROUPS:
            kind = GROUPS[group].kind
            names.update({name: plugin_summary(registry.get(kind, name)) for name in registry.names(kind)})
        if names:
            spelled = GROUPS[group].choose if group in GROUPS else f"{group}=NAME"
            found[spelled] = dict(sorted(names.items()))
    return found


def _chosen_plugins(command: Command, registry: Registry, overrides: list[str]) -> list[str]:
    """The parameters of plugins that the line chooses; only these are imported."""
    lines: list[str] = []
    for key, name in _chosen(overrides):
        group = GROUPS[key.partition(".")[0]]
        if key.partition(".")[0] not in command.schema.__dataclass_fields__ or name not in registry.names(group.kind):
            continue
        plugin = registry.get(group.kind, name)
        prefix = group.prefix(name).replace("steps.STEP", key)
        lines += ["", *_hanging(f"{key}={name}: ", plugin.description)]
        lines += [f"  {prefix}.{item.name}  {item.annotation}, {_default(item)}" for item in parameters_of(plugin)]
    return lines


def _chosen(overrides: list[str]) -> list[tuple[str, str]]:
    """Where something is chosen, and what: `merge`, `steps.after_load`."""
    places = [word.partition("=")[0].partition("@")[2] for word in overrides if word.startswith("+steps@")]
    return [(place, name) for place in (*GROUPS, *places) for name in chosen(overrides, place)]


def _default(parameter: Parameter) -> str:
    return "required" if parameter.default is Parameter.REQUIRED else f"{parameter.default!r}"


def _flags() -> list[str]:
    flags = {
        "--config-dir DIR": "a folder of your own configs, searched first (adapters/a.yaml, assemble.yaml, ...)",
        "--cfg job": "print the composed config, run nothing",
        "-m": "one run for each combination of comma-separated values",
        "--shell-completion": 'install=bash: eval "$(multilora-store -sc install=bash)"; or zsh; fish: ... | source',
        "--version, --hydra-help": "this program's version; Hydra's own flags",
    }
    lines = ["flags:"]
    for flag, doc in flags.items():
        lines += _hanging(f"  {flag:<25}", doc, indent=27)
    return [*lines, "In zsh, and always to be safe, quote brackets: '+adapters=[a,b]'."]


def _hanging(head: str, text: str, indent: int | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=head,
        subsequent_indent=" " * (indent if indent is not None else min(len(head), 40)),
        break_on_hyphens=False,
        break_long_words=False,
    ) or [head.rstrip()]
