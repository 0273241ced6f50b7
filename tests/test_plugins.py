"""The one door: what comes in is checked first, imported late, and named when it is faulty."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from multilora_store import plugins as plugin_door
from multilora_store.cli.plugins import load_plugins
from multilora_store.cli.summaries import plugin_summary
from multilora_store.errors import PluginError
from multilora_store.plugins import BUILTINS, KINDS, Parameter, Plugin, Registry, default_registry, plugin

GOOD = '''
from multilora_store.plugins import plugin

@plugin("merge_strategy")
def halves(deltas, weights, *, share: float = 0.5, rounds: int):
    """Takes half of each.

    More words.
    """
    return deltas

def helper():
    return None
'''


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_dropin_is_declared_with_its_parameters(tmp_path: Path) -> None:
    registry = Registry()
    registry.load_dropins([write(tmp_path, "halves.py", GOOD)])
    found = registry.get("merge_strategy", "halves")
    assert found.description == "Takes half of each."
    assert found.parameters == (
        Parameter(name="share", annotation="float", default=0.5),
        Parameter(name="rounds", annotation="int", default=Parameter.REQUIRED),
    )
    assert found.origin == str(tmp_path / "halves.py")
    assert found.load()("x", [], rounds=1) == "x"
    registry.load_dropins([tmp_path])  # the same file by its folder: no duplicate
    assert registry.names("merge_strategy") == ("halves",)


def test_faulty_files_are_named_and_the_others_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "a_broken.py", "import does_not_exist")
    write(tmp_path, "b_syntax.py", "def (")
    write(tmp_path, "c_empty.py", "x = 1")
    write(tmp_path, "d_kind.py", 'from multilora_store.plugins import plugin\n@plugin("mergers")\ndef f(): ...')
    write(tmp_path, "e_good.py", GOOD)
    write(tmp_path, "f_again.py", GOOD)
    registry = Registry()
    with caplog.at_level(logging.WARNING):
        registry.load_dropins([tmp_path, tmp_path / "absent.py"])
    assert registry.names("merge_strategy") == ("halves",)
    for name in ("a_broken.py", "b_syntax.py", "c_empty.py", "d_kind.py", "f_again.py", "absent.py"):
        assert any(name in record.getMessage() for record in caplog.records), name
    for name in ("a_broken.py", "b_syntax.py", "c_empty.py", "d_kind.py", "absent.py"):
        with pytest.raises(PluginError, match=name):
            Registry().load_dropins([tmp_path / name], strict=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('@plugin("source", requires=">=99")\ndef f(location): ...', "needs multilora-store>=99, and this is"),
        ('@plugin("source", requires="later")\ndef f(location): ...', "names no versions|is no version specifier"),
        ('@plugin("exporter")\ndef f(location): ...', r"kind exporter: it takes \(location\)"),
        ('@plugin("audit_check")\ndef f(model, factor): ...', r"it takes \(model, factor\)"),
        ('@plugin("source", name="my reader")\ndef f(location): ...', "could not be chosen by that name"),
    ],
)
def test_another_version_kind_or_name_is_refused_with_the_file(tmp_path: Path, text: str, told: str) -> None:
    file = write(tmp_path, "one.py", f"from multilora_store.plugins import plugin\n{text}\n")
    registry = Registry()
    registry.load_dropins([file])
    assert registry.all() == ()
    assert "one.py" in registry.faults[0].what
    with pytest.raises(PluginError, match=told):
        Registry().load_dropins([file], strict=True)


def test_a_distribution_for_another_version_is_named_and_the_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, needs in (("old", "multilora_store<0.0.1"), ("fine", 'multilora-store>=9; extra == "later"')):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        write(info, "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n")
        write(info, "entry_points.txt", f"[multilora_store.plugins]\nsource.{name} = json:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry()
    registry.load_entry_points()
    assert "fine" in registry.names("source")
    assert "old" not in registry.names("source")
    assert "distribution old is left out: old 1.0 needs multilora-store<0.0.1" in registry.faults[0].what
    monkeypatch.setattr(plugin_door, "_DEFAULT", [registry])
    assert load_plugins([], (), "list") is registry
    with pytest.raises(PluginError, match="distribution old is left out"):
        load_plugins(["plugins.strict=true"], (), "list")


def test_adding_is_all_or_nothing() -> None:
    registry = Registry([Plugin(kind="source", name="x", target="m:x", origin="one")])
    fresh = Plugin(kind="source", name="y", target="m:y", origin="two")
    with pytest.raises(PluginError, match="'x' of two is already declared by one"):
        registry.add(fresh, Plugin(kind="source", name="x", target="m:z", origin="two"))
    assert registry.names("source") == ("x",)


def test_unknown_names_and_kinds_list_the_valid_ones() -> None:
    registry = Registry([Plugin(kind="source", name="kohya", target="m:x", origin="one")])
    with pytest.raises(PluginError, match="did you mean kohya"):
        registry.get("source", "koyha")
    with pytest.raises(PluginError, match="did you mean source"):
        registry.get("sauce", "x")
    with pytest.raises(PluginError, match="unknown kind of plugin"):
        plugin("mergers")


@pytest.mark.parametrize("target", ["does_not_exist:x", "json:does_not_exist", "json:__name__"])
def test_a_target_that_cannot_be_loaded_names_the_plugin(target: str) -> None:
    with pytest.raises(PluginError, match="source 'x' of dist"):
        Plugin(kind="source", name="x", target=target, origin="dist").load()


def test_every_builtin_loads_and_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = default_registry()
    with monkeypatch.context() as patch:  # as before anything is imported: out of the sources
        patch.setattr("multilora_store.cli.summaries.sys", SimpleNamespace(modules={}))
        read = {(kind, name): plugin_summary(registry.get(kind, name)) for kind, name in BUILTINS}
    for kind, name in BUILTINS:
        found = registry.get(kind, name)
        assert kind in KINDS
        assert callable(found.load())
        assert re.search(r"[.:)]$|`$", found.description), f"{kind} {name}: {found.description}"
        assert read[kind, name] == found.description
        assert all(item.annotation != "Any" for item in found.parameters), f"{kind} {name} has untyped parameters"
