"""The one door: what comes in is checked first, imported late, and named when it is faulty."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from multilora_store.errors import PluginError
from multilora_store.plugins import BUILTINS, KINDS, Parameter, Plugin, Registry, default_registry, plugin

GOOD = '''
from multilora_store.plugins import plugin

@plugin("merge_strategy")
def halves(deltas, *, share: float = 0.5, rounds: int):
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
    assert found.load()("x", rounds=1) == "x"
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


def test_every_builtin_loads_and_says_what_it_does() -> None:
    registry = default_registry()
    for kind, name in BUILTINS:
        found = registry.get(kind, name)
        assert kind in KINDS
        assert callable(found.load())
        assert found.description, f"{kind} {name} has no docstring"
        assert all(item.annotation != "Any" for item in found.parameters), f"{kind} {name} has untyped parameters"
