"""The documentation tells the truth: its code runs, its commands exist, its schemas fit, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from multilora_store import plugins as plugin_door
from multilora_store.cli import main
from multilora_store.cli.catalogue import COMMANDS
from multilora_store.cli.options import options_of
from multilora_store.errors import __all__ as errors

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```\s*?$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"(?:python -m multilora_store|multilora-store)(?= |$)")
HOME = "/home/me"


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line it starts on, its language, its title (a file to be written), its text."""

    page: str
    line: int
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match[3])
        found.append(
            Block(
                page=page.name,
                line=text[: match.start()].count("\n") + 1,
                language=match[2],
                title=title[1] if title else "",
                text=textwrap.dedent(match[4]),
            )
        )
    return found


def command_lines(block: Block) -> list[str]:
    """The lines of a shell block, continued ones joined."""
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, a cache and a registry of its own, and what torchrun tells a single rank."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("MULTILORA_STORE", "MULTILORA_CACHE", "HYDRA_FULL_ERROR", "AWS_ENDPOINT_URL", "COMP_LINE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugin_door, "_DEFAULT", [])
    return folder


@pytest.fixture
def no_ranks_left() -> Iterator[None]:
    """A page may start a process group; it ends with the page."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def run_shell(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the lines that call the program, in this process; `export` is kept, other programs are not started."""
    for line in command_lines(block):
        export = re.fullmatch(r"export (\w+)=(\S+)", line)
        if export:
            monkeypatch.setenv(export[1], export[2])
        called = PROGRAM.match(line)
        if called is None:
            continue
        wanted = re.search(r"# exit code (\d)", line)
        code = main(shlex.split(line[called.end() :], comments=True))
        assert code == int(wanted[1] if wanted else 0), f"{block.page}:{block.line}: {line}: exit code {code}"


def run_script(block: Block, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run `$ torchrun ... FILE.py`, where the page has given the file, as the only rank; what follows is its output.

    `$ pytest FILE.py` is run by pytest itself.
    """
    first, *rest = command_lines(block)
    tested = re.fullmatch(r"\$ pytest ([\w-]+\.py)", first)
    if tested:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(here)])}
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tested[1]]
        done = subprocess.run(line, cwd=here, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{block.page}:{block.line}: {done.stdout}{done.stderr}"
    called = re.fullmatch(r"\$ torchrun .*?([\w-]+\.py)", first)
    if called and (here / called[1]).exists():
        exec(compile((here / called[1]).read_text(encoding="utf-8"), called[1], "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.splitlines() == rest, f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("no_ranks_left")
def test_every_block_of_a_page_runs_and_prints_what_it_says(
    page: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in one folder and one namespace; a `text` block is the output of the block before it.

    A block with a title is a file; a `console` block needs more than this machine has, and is not run but for scripts.
    """
    space: dict[str, Any] = {"__name__": "__main__"}
    output: str | None = None
    for block in blocks(page):
        where = f"{block.page}:{block.line}"
        if block.language == "text":
            if output is not None:
                assert block.text.rstrip() == output.rstrip(), f"{where}: this is not what the block before it prints"
            output = None
            continue
        output = None
        capsys.readouterr()
        if block.title:
            file = here / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, where, "exec"), space)
            output = capsys.readouterr().out.replace(str(here), HOME)
        elif block.language == "console":
            run_script(block, here, capsys)
        elif block.language == "bash":
            run_shell(block, monkeypatch)
            output = capsys.readouterr().out.replace(str(here), HOME)


def _shown() -> list[tuple[str, str]]:
    lines = [(b, line) for page in PAGES for b in blocks(page) if b.language == "console" for line in command_lines(b)]
    return [(f"{b.page}:{b.line}", line.removeprefix("$ ")) for b, line in lines if line.startswith("$ ")]


@pytest.mark.parametrize(("where", "line"), [case for case in _shown() if PROGRAM.search(case[1])])
def test_commands_that_need_more_than_this_machine_compose(
    where: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A `console` block needs a bucket, a model or more ranks; its verbs and options are real all the same."""
    words = shlex.split(line[PROGRAM.search(line).end() :], comments=True)  # type: ignore[union-attr]
    assert main([*words, "--cfg", "job"]) == 0, f"{where}: {line}: {capsys.readouterr().err}"


# Links.


def slug(heading: str) -> str:
    """The anchor that the site gives a heading."""
    bare = re.sub(r"\[([^]]*)\]\([^)]*\)|`|\*", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", bare).strip().lower())


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`(?!\])", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}; headings: {sorted(anchors(file))}"


def test_every_page_stands_in_the_navigation() -> None:
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]))
    assert named == {page.name for page in PAGES}


def test_promises_name_tests_that_exist() -> None:
    text = (DOCS / "promises.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (?=\d+\. )", text, flags=re.MULTILINE)[1:]
    assert [int(section.partition(".")[0]) for section in sections] == list(range(1, 11))
    for section in sections:
        named = re.findall(r"\]\(\.\./(tests/[^)]+\.py)\)", section)
        assert named, f"no test: {section.partition(chr(10))[0]}"
        assert not [name for name in named if not (ROOT / name).is_file()]


def test_errors_that_pages_name_exist() -> None:
    for page in PAGES:
        named = set(re.findall(r"`(?:multilora_store\.errors\.)?([A-Z]\w+Error)`", page.read_text(encoding="utf-8")))
        builtin = {name for name in named if hasattr(__builtins__, name) or name in dir(__import__("builtins"))}
        assert named - builtin <= set(errors), f"{page.name}: {named - builtin - set(errors)}"


# The generated pages.


def hook() -> Any:
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "hooks" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_holds_every_command_option_and_example() -> None:
    page = hook().commands_markdown()
    sections = dict(re.findall(r"^## `([a-z-]+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(COMMANDS)
    for command in COMMANDS.values():
        for option in options_of(command.schema):
            row = f"| `{option.key}` | {option.type} | `{option.default}` |".replace("table|json", "table or json")
            assert row in page, f"{command.name}: {row}"
        assert all(f"multilora-store {example}" in sections[command.name] for example in command.examples)


@pytest.mark.parametrize("name", [*COMMANDS])
def test_the_examples_of_the_help_compose(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text(
        "from multilora_store.plugins import plugin\n\n\n"
        "@plugin('audit_check')\ndef looks(model):\n    yield from ()\n",
        encoding="utf-8",
    )
    for example in COMMANDS[name].examples:
        words = shlex.split(example, comments=True)
        assert main([*words, "--cfg", "job"]) == 0, f"{example}: {capsys.readouterr().err}"


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install '.[docs]'")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    built = (tmp_path / "site" / "commands" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in built for name in COMMANDS)
    assert "source/tests" in (tmp_path / "site" / "promises" / "index.html").read_text(encoding="utf-8")


# output=json.


def schemas() -> dict[str, Any]:
    """Heading of docs/json.md -> the shape under it."""
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    found = {heading.strip("` "): re.search(r"```json\n(.*?)```", body, re.DOTALL) for heading, body in sections}
    return {heading: json.loads(body[1]) for heading, body in found.items() if body is not None}


def faults(value: Any, shape: Any, shared: dict[str, Any], where: str = "") -> list[str]:
    """Where `value` is not of `shape`: words for types, `[shape]`, an object by its keys or by `<any key>`."""
    if isinstance(shape, str):
        return _faults_of_words(value, shape, shared, where)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [fault for at, item in enumerate(value) for fault in faults(item, shape[0], shared, f"{where}[{at}]")]
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    free = next((key for key in shape if key.startswith("<")), None)
    if free is not None:
        return [f for key, item in value.items() for f in faults(item, shape[free], shared, f"{where}.{key}")]
    found = [f"{where}.{key}: not in the documentation" for key in value.keys() - shape.keys()]
    found += [f"{where}.{key}: missing" for key in shape.keys() - value.keys()]
    for key in shape.keys() & value.keys():
        found += faults(value[key], shape[key], shared, f"{where}.{key}")
    return found


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),), "object": (dict,), "list": (list,),
}  # fmt: skip


def _faults_of_words(value: Any, shape: str, shared: dict[str, Any], where: str) -> list[str]:
    last = [f"{where}: {value!r} is not {shape}"]
    for word in shape.split(" or "):
        if word in shared:
            found = faults(value, shared[word], shared, where)
            if not found:
                return []
            last = last if value is None else found
        elif word == "any" or (isinstance(value, _KINDS[word]) and (word == "boolean") == isinstance(value, bool)):
            return []
    return last


def test_a_shape_tells_what_does_not_fit() -> None:
    shape = {"a": "integer or null", "b": ["Thing"], "c": {"<name>": "number"}}
    shared = {"Thing": {"d": "string"}}
    assert not faults({"a": None, "b": [{"d": "x"}], "c": {"x": 1.5}}, shape, shared)
    wrong = {"a": True, "b": [{"d": 1, "e": 2}], "c": {"x": "1"}, "f": 0}
    assert len(faults(wrong, shape, shared)) == 5


def scenario(folder: Path) -> None:
    """A store `s` with versions, tags and a snapshot, the demo's adapters under `peft`, its base under `base`."""
    lines = (
        "assemble '+adapters=[a,b]' export=./peft",
        "import ./peft store.url=s tags=[best]",
        "assemble '+adapters=[a,b]' store.url=s base=demo save.step=1",
    )
    for line in lines:
        assert main(shlex.split(line)) == 0, line
    from safetensors.torch import save_file

    from multilora_store.assembly.bases import demo_base

    base = folder / "base"
    base.mkdir()
    save_file(demo_base().state_dict(), base / "model.safetensors")
    (base / "config.json").write_text("{}", encoding="utf-8")


def test_the_page_of_benchmarks_shows_words_and_results(tmp_path: Path) -> None:
    (tmp_path / "speed.py").write_text('"""Measures speed."""\n', encoding="utf-8")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "speed.json").write_text('{"ours": {"seconds": 0.5}, "peers": [2]}', encoding="utf-8")
    page = hook().benchmarks_markdown(tmp_path)
    assert all(words in page for words in ("Measures speed.", "| `ours.seconds` | 0.5 |", "| `peers.0` | 2 |"))
    scripts = [script.name for script in (ROOT / "benchmarks").glob("*.py")]
    assert scripts
    assert all(f"`{name}`" in hook().benchmarks_markdown() for name in scripts)


def test_documents_of_commands_are_as_documented(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario(here)
    shapes, ran = schemas(), set()
    for line in LINES:
        heading = next(name for name in sorted(shapes, key=len, reverse=True) if _of(line, name))
        capsys.readouterr()
        if line == "verify b store.url=s":
            damage(here)
        code = main([*shlex.split(line), "output=json"])
        out = capsys.readouterr().out
        assert out.count("\n") == 1, f"{line}: one document on one line"
        document = json.loads(out)
        assert (document.pop("command"), document.pop("exit")) == (line.split()[0], code)
        assert not faults(document, shapes[heading], shapes), f"{line}, documented as {heading!r}"
        ran.add(heading)
    documented = {name for name in shapes if name.split()[0] in COMMANDS or name == "error"}
    assert {name.split()[0] for name in documented} - {"error"} == set(COMMANDS)
    assert ran == documented


def damage(here: Path) -> None:
    """Cut the end off one stored file."""
    file = next((here / "s" / "adapters" / "b").glob("*/adapter_model.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def _of(line: str, heading: str) -> bool:
    """Whether the words of `heading` all stand in the command line."""
    if heading == "error":
        return "no-such-adapter" in line
    return heading.split()[0] == line.split()[0] and all(
        word in line.split() or (word.endswith("=") and f" {word}" in line) for word in heading.split()
    )


LINES = (
    "assemble '+adapters=[a,b]' store.url=s base=demo export=./out/a save.step=2 lock=set.lock.json",
    "assemble '+adapters=[a,b]' store.url=s base=demo merge=linear merge.into=ab",
    "assemble '+adapters=[a,b]' store.url=s dry_run=true",
    "plan '+adapters=[a,b]' store.url=s base=demo world_size=4",
    "import ./peft/a store.url=s name=c",
    "export a@best ./out/b store.url=s",
    "export a ./out/merged store.url=s kind=merged base=hf base.path=base",
    "path a store.url=s",
    "list store.url=s",
    "report store.url=s",
    "show a store.url=s tensors=true",
    "show plugins",
    "log store.url=s",
    "snapshots store.url=s",
    "snapshots latest store.url=s",
    "tag a@latest good store.url=s",
    "tag a good remove=true store.url=s",
    "delete c store.url=s",
    "restore ./out/c store.url=s",
    "restore to=2 store.url=s dry_run=true",
    "sync s ./copy",
    "gc store.url=s",
    "doctor '+adapters=[a,b]' store.url=s base=demo",
    "doctor ./peft",
    "verify store.url=s",
    "verify store.url=s profile=vllm",
    "merge '+adapters=[a,b]' merge=linear merge.into=ab store.url=s",
    "diff a b store.url=s",
    "diff a a store.url=s",
    "show no-such-adapter store.url=s",
    "verify b store.url=s",
    "repair store.url=s dry_run=true",
)
