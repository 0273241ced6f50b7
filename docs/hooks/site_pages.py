"""What the site shows beyond the Markdown files: commands, benchmarks, and the files that pages link to.

Named in `mkdocs.yml`. A mark in a page stands for what is written from the program itself or from the benchmarks'
own words and results; a link to a file of the repository (`../tests/...`) leads to a copy of it under `source/`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multilora_store.cli.catalogue import COMMANDS, Command
from multilora_store.cli.choices import GROUPS, Group, parameters_of
from multilora_store.cli.options import Option, options_of
from multilora_store.cli.schema import AdapterEntry, Common
from multilora_store.plugins import Parameter, Plugin, default_registry

__all__ = ["benchmarks_markdown", "commands_markdown", "on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\(\.\./([^)#]+)\)")


def commands_markdown() -> str:
    """Every command with its options and examples, what all share, and the choices that plugins fill."""
    parts = [_command(command) for command in COMMANDS.values()]
    shared = ["## What every command takes {#shared}", _options(options_of(Common))]
    adapter = [
        "## Each adapter of a set {#adapter}",
        "Overridden as `adapters.NAME.FIELD=...`, or written in a file `adapters/NAME.yaml`.",
        _options(options_of(AdapterEntry)),
    ]
    choices = ["## Choices {#choices}", *(_group(name, group) for name, group in GROUPS.items())]
    return "\n\n".join([*parts, *shared, *adapter, *choices]) + "\n"


def _command(command: Command) -> str:
    shared = {option.key for option in options_of(Common)}
    own = [option for option in options_of(command.schema) if option.key not in shared]
    words = "".join(f" [{word.upper()}]" for word in command.words)
    lines = [f"## `{command.name}`", f"{command.summary[:1].upper()}{command.summary[1:]}."]
    lines.append("```console\n" + "\n".join(f"$ multilora-store {example}" for example in command.examples) + "\n```")
    lines.append(f"Usage: `multilora-store {command.name}{words} [key=value ...] [flags]`")
    if command.demo:
        lines.append("Works on the embedded demo where no store is configured.")
    lines.append(_options(own))
    also = ["[what every command takes](#shared)"]
    if "adapters" in command.schema.__dataclass_fields__:
        also.append("[the fields of each adapter](#adapter)")
    groups = [name for name in GROUPS if name in command.schema.__dataclass_fields__]
    if groups:
        also.append("the choices of " + ", ".join(f"[`{GROUPS[name].choose}`](#{name})" for name in groups))
    return "\n\n".join([*lines, "And " + ", ".join(also) + "."])


def _options(options: list[Option]) -> str:
    rows = [
        f"| `{option.key}` | {option.type.replace('|', ' or ')} | `{option.default}` | {_cell(option.doc)} |"
        for option in options
    ]
    return "\n".join(["| option | type | default | |", "|---|---|---|---|", *rows])


def _group(name: str, group: Group) -> str:
    registry = default_registry()
    plugins = [registry.get(group.kind, one) for one in registry.names(group.kind)]
    rows = [f"| `{plugin.name}` | {_cell(plugin.description)} | {_parameters(plugin)} |" for plugin in plugins]
    rows = rows or ["| | none is built in; see [shipped drop-ins](plugins.md#shipped-drop-ins) | |"]
    head = f"| NAME | | `{group.params}...` |"
    return "\n".join([f"### `{group.choose}` {{#{name}}}", "", head, "|---|---|---|", *rows])


def _parameters(plugin: Plugin) -> str:
    words = [
        f"`{item.name}`" if item.default is Parameter.REQUIRED else f"`{item.name}={item.default}`"
        for item in parameters_of(plugin)
    ]
    return ", ".join(words)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def benchmarks_markdown(folder: Path = ROOT / "benchmarks") -> str:
    """Each script in its own words, and what was measured with it where that was kept."""
    parts = []
    for script in sorted(folder.glob("[!_]*.py")):
        words = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        parts += [f"## `{script.name}`", f"```text\n{words}\n```"]
        for file in sorted((folder / "results").glob(f"{script.stem}*.json")):
            rows = [f"| `{key}` | {value} |" for key, value in _flat(json.loads(file.read_text(encoding="utf-8")))]
            parts += [f"`{file.name}`:", "\n".join(["| | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """A nested result as rows."""
    if isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, f"{value:.4g}" if isinstance(value, float) else _cell(str(value))


_MARKS = {"<!-- commands -->": commands_markdown, "<!-- benchmarks -->": benchmarks_markdown}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put what is generated where its mark is, and lead links out of `docs` to the copies."""
    for mark, written in _MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, written())
    depth = page.file.src_uri.count("/")
    return _LINK.sub(lambda link: f"]({'../' * depth}source/{link[1]})", markdown)


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add a copy of each file of the repository that a page links to."""
    from mkdocs.structure.files import File

    linked = {
        match[1]
        for page in files.documentation_pages()
        for match in _LINK.finditer(Path(page.abs_src_path).read_text(encoding="utf-8"))
    }
    for name in sorted(name for name in linked if (ROOT / name).is_file()):  # mkdocs names those that are not
        files.append(File.generated(config, f"source/{name}", abs_src_path=str(ROOT / name)))
    return files
