"""A command line run in this process, in an empty folder and an environment of its own."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from multilora_store import plugins as plugin_door
from multilora_store.cli import main


@dataclass(frozen=True)
class Result:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def error_lines(self) -> list[str]:
        """stderr without the demo's note."""
        return [line for line in self.err.splitlines() if not line.startswith("This is the embedded demo")]


Run = Callable[[str], Result]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, an empty cache, and none of the user's variables."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("MULTILORA_STORE", "HYDRA_FULL_ERROR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "COMP_LINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin_door, "_DEFAULT", [])  # a registry of its own: drop-ins of one test stay in it
    return folder


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line, typed as in a shell; it must leave the working folder as it was unless it writes there."""

    def run(line: str) -> Result:
        capsys.readouterr()
        code = main(shlex.split(line))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def configs(here: Path) -> Callable[..., Path]:
    """Make a folder of the user's own configs: file -> text."""

    def make(**files: str) -> Path:
        folder = here.parent / "conf"
        for name, text in files.items():
            file = folder / f"{name.replace('__', '/')}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return folder

    return make


@pytest.fixture
def store(here: Path, made_store: Path) -> str:
    """A store with two versions of `a`, one of `b`, one of `team/zh`, a tag `best` on the first `a`."""
    return str(shutil.copytree(made_store, here.parent / "store"))


@pytest.fixture
def base_folder(here: Path) -> Path:
    """The demo's base as a folder of configuration and safetensors."""
    from safetensors.torch import save_file

    from multilora_store.assembly.bases import demo_base

    folder = here.parent / "base"
    folder.mkdir()
    save_file(demo_base().state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["DemoForCausalLM"], "tie_word_embeddings": False, "model_type": "demo"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def made_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `store` is a copy of: written once."""
    from multilora_store import open_store
    from multilora_store.assembly.bases import demo_adapters

    folder = tmp_path_factory.mktemp("made") / "store"
    made = demo_adapters()
    opened = open_store(folder)
    config, tensors = made["a"]
    first = opened.put("a", tensors, config, tags=["best"], step=1)
    opened.put("a", {key: value * 2 for key, value in tensors.items()}, config, step=2, parents=[first])
    opened.put("b", made["b"][1], made["b"][0])
    opened.put("team/zh", made["c"][1], made["c"][0], metadata={"title": "中文"})
    return folder
