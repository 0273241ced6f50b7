"""The floors stay in order, the public names are what they say, and importing the package stays cheap."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import multilora_store

PACKAGE = Path(multilora_store.__file__).parent
FLOORS = (
    "errors",
    "adapter",
    "manifest",
    "plugins",
    "storage",
    "assembly",
    "distributed",
    "merging",
    "integrations",
    "testing",
    "cli",
)
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.parts and "dropins" not in path.parts)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else None


def imports_of(path: Path, *, top_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    nodes = [node for node in (tree.body if top_level else ast.walk(tree)) if id(node) not in typing_only]
    found = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{name.name}" for name in node.names)
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_a_floor_imports_only_from_floors_below_it(path: Path) -> None:
    floor = floor_of(module_of(path))
    if floor is None:
        pytest.skip("the package itself and its entry point stand above all floors")
    allowed = set(FLOORS[: FLOORS.index(floor) + 1])
    used = {target for name in imports_of(path) if name.startswith("multilora_store") and (target := floor_of(name))}
    assert used <= allowed, f"{module_of(path)} reaches up to {sorted(used - allowed)}"


def test_no_module_is_part_of_a_circle() -> None:
    modules = {module_of(path): path for path in MODULES}
    edges = {
        name: {
            target
            for target in imports_of(path, top_level=True)
            if target in modules and target != name and not name.startswith(target + ".")
        }
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_public_names_are_exactly_all_and_each_can_be_loaded() -> None:
    assert sorted(multilora_store._HOMES) == sorted(multilora_store.__all__)
    for name in multilora_store.__all__:
        assert callable(getattr(multilora_store, name)), name


@pytest.mark.parametrize("floor", [floor for floor in FLOORS if (PACKAGE / floor).exists()])
def test_every_floor_names_what_is_public(floor: str) -> None:
    module = importlib.import_module(f"multilora_store.{floor}")
    missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
    assert getattr(module, "__all__", None) is not None, f"{floor} has no __all__"
    assert not missing, f"{floor} promises names that it does not have: {missing}"


@pytest.mark.parametrize(
    "code",
    [
        "import multilora_store, multilora_store.plugins, multilora_store.manifest",
        "import multilora_store.storage, multilora_store.cli",
    ],
)
def test_importing_the_light_floors_imports_no_torch(code: str) -> None:
    check = f"{code}; import sys; print([m for m in ('torch', 'peft', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_only_the_command_line_prints_or_exits() -> None:
    offenders = [
        f"{module_of(path)}:{node.lineno}"
        for path in MODULES
        if floor_of(module_of(path)) not in {None, "cli"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.exit", "exit"}
    ]
    assert offenders == []
