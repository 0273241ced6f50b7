"""Which modules of an assembled model become one FSDP unit: blocks, and for each adapter its part of each block.

Only decisions here, on names and shapes; nothing is wrapped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from multilora_store.assembly.bridge import (
    adapter_modules,
    adapter_names,
    adapter_parameters,
    innermost,
    record,
    unwrap,
    walk,
)
from multilora_store.distributed.places import places
from multilora_store.errors import UnsupportedError, UsageError, choices

__all__ = [
    "Resident",
    "Unit",
    "UnitPlan",
    "block_of",
    "choose_granularity",
    "expert_blocks",
    "find_blocks",
    "find_experts",
    "plan_units",
    "refuse_attention",
]

_EXPERT: Final = re.compile(r"experts?$", re.IGNORECASE)
PREFIX: Final = "base_model.model."


@dataclass(frozen=True)
class Unit:
    """The modules of one adapter that are gathered together.

    Args:
        adapter: The adapter's name.
        block: Path of the block they lie in, "" outside all blocks.
        paths: Paths of the modules from the innermost model.
    """

    adapter: str
    block: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Resident:
    """A tensor of an adapter that cannot be in a unit of its own, with the reason.

    Args:
        adapter: The adapter's name.
        tensor: Its canonical name.
        block: The block whose unit it stays in, "" for the root's.
        reason: Why, in words.
    """

    adapter: str
    tensor: str
    block: str
    reason: str


@dataclass(frozen=True)
class UnitPlan:
    """Every adapter tensor is either in one of the units or one of the residents."""

    units: tuple[Unit, ...]
    residents: tuple[Resident, ...]


def find_blocks(base: nn.Module, names: Iterable[str] | None = None) -> dict[str, str]:
    """Path -> class name of the repeated blocks of a base, outermost only, in the model's order.

    Args:
        base: The innermost model.
        names: Class names that the user gives. Without them: `_no_split_modules` of Hugging Face models, else the
            children of every outermost `ModuleList` that are of one class and hold parameters.

    Raises:
        UsageError: no module has one of the given class names.
    """
    wanted = set(names) if names is not None else _no_split(base)
    if wanted:
        found = _outermost(base, {path: m for path, m in walk(base) if type(unwrap(m)).__name__ in wanted})
        missing = wanted - set(found.values()) if names is not None else set()
        if missing:
            classes = {type(m).__name__ for _, m in walk(base) if any(True for _ in m.parameters())}
            raise UsageError(
                f"no block of class {', '.join(sorted(missing))} in this {type(base).__name__}",
                remedy=choices(min(missing), classes, noun="class"),
            )
        if found:
            return found
    lists: dict[str, nn.Module] = {}
    for path, module in walk(base):
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            kinds = {type(unwrap(child)) for child in module}
            if len(kinds) == 1 and all(any(True for _ in child.parameters()) for child in module):
                lists.update({f"{path}.{index}" if path else str(index): child for index, child in enumerate(module)})
    return _outermost(base, lists)


def _no_split(base: nn.Module) -> set[str]:
    found: set[str] = set()
    for _, module in walk(base):
        found.update(getattr(module, "_no_split_modules", None) or ())
    return found


def _outermost(base: nn.Module, modules: dict[str, nn.Module]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for path, module in modules.items():
        if path and not any(path.startswith(f"{above}.") for above in kept):
            kept[path] = type(unwrap(module)).__name__
    return kept


def block_of(path: str, blocks: Iterable[str]) -> str:
    """The block that `path` lies in, "" if none."""
    return next((block for block in blocks if path == block or path.startswith(f"{block}.")), "")


def find_experts(base: nn.Module, blocks: Iterable[str]) -> tuple[str, ...]:
    """Paths of modules that may run on some ranks only: lists inside a block, and whatever is called experts."""
    known = tuple(blocks)
    found: list[str] = []
    for path, module in walk(base):
        named = _EXPERT.search(path.rpartition(".")[2]) is not None
        listed = isinstance(module, nn.ModuleList) and block_of(path, known) not in ("", path)
        if path and (named or listed) and not any(path.startswith(f"{above}.") for above in found):
            found.append(path)
    return tuple(found)


def choose_granularity(asked: str, base: nn.Module, blocks: Iterable[str]) -> tuple[str, str]:
    """The granularity, and why: `auto` is `layer` where a block is compiled, else `adapter`."""
    if asked != "auto":
        return asked, "as asked"
    located = places(base)
    compiled = next((path for path in blocks if located[path].compiled), None)
    if compiled is None:
        return "adapter", "an inactive adapter then never travels"
    return "layer", f"{compiled} is compiled, and hooks of adapter units would break its graph"


def expert_blocks(base: nn.Module, blocks: Iterable[str]) -> list[str]:
    """The blocks that hold experts."""
    known = list(blocks)
    experts = find_experts(base, known)
    return [path for path in known if any(block_of(expert, [path]) for expert in experts)]


def refuse_attention(model: nn.Module) -> None:
    """Adapters on `nn.MultiheadAttention` cannot be sharded.

    Raises:
        UnsupportedError: naming the first such target.
    """
    for site in record(model).sites:
        target = getattr(site.layer, "base_layer", None)
        if isinstance(target, nn.MultiheadAttention):
            raise UnsupportedError(
                f"adapters on {site.path} cannot be sharded: it is an nn.MultiheadAttention",
                why="PEFT merges into its packed weights within the forward, which sharded parameters do not allow",
                remedy="target the projections of an attention made of Linear layers, or leave the model unsharded",
                path=site.path,
            )


def plan_units(model: nn.Module, blocks: Sequence[str], names: Iterable[str] | None = None) -> UnitPlan:
    """One unit for each (adapter, block), one for what an adapter has outside the blocks, one for each saved module.

    What is read from outside its own forward (factors of expert parameters) or may run on some ranks only (experts)
    stays in the block's unit; entries of dictionaries that all adapters share (embeddings, trainable tokens) stay
    with what contains them.
    """
    experts = find_experts(innermost(model), blocks)
    in_place = {site.path for site in record(model).sites if hasattr(site.layer, "parameter_name")}
    units: list[Unit] = []
    residents: list[Resident] = []
    for name in adapter_names(model) if names is None else names:
        modules = adapter_modules(model, name)
        grouped: dict[str, list[str]] = defaultdict(list)
        reasons: dict[str, str] = {}
        for path in modules:
            block = block_of(path, blocks)
            holder, _, _ = path.rpartition(".")
            site, _, kind = holder.rpartition(".")
            if kind == "modules_to_save":
                grouped[path].append(path)
            elif site in in_place:
                reasons[path] = "its factors are read inside the forward of the expert parameters"
            elif block_of(path, experts):
                reasons[path] = "ranks may route to different experts, so all of a block's experts are one unit"
            else:
                grouped[block].append(path)
        for key, paths in grouped.items():
            block = block_of(paths[0], blocks) if key == paths[0] else key
            units.append(Unit(name, block, tuple(paths)))
        residents += _residents(model, name, blocks, modules, grouped, reasons)
    return UnitPlan(tuple(units), tuple(residents))


def _residents(
    model: nn.Module,
    name: str,
    blocks: Sequence[str],
    modules: dict[str, nn.Module],
    grouped: dict[str, list[str]],
    reasons: dict[str, str],
) -> list[Resident]:
    unit_parameters = {id(p) for paths in grouped.values() for path in paths for p in modules[path].parameters()}
    because = {id(p): reason for path, reason in reasons.items() for p in modules[path].parameters()}
    shared = "it lies in a dictionary that all adapters share, which cannot be a unit"
    return [
        Resident(name, tensor, block_of(tensor.removeprefix(PREFIX), blocks), because.get(id(p), shared))
        for tensor, p in adapter_parameters(model, name).items()
        if id(p) not in unit_parameters
    ]
