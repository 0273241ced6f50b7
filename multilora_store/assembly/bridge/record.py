"""What an assembled model knows about its set: kept on the PeftModel, made on first use for one that PEFT built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

from peft import PeftModel
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from multilora_store.adapter import AdapterConfig, module_name, name_from_module
from multilora_store.assembly.bridge.unwrap import innermost, peft_model, unwrap, walk
from multilora_store.errors import UsageError, choices
from multilora_store.manifest import AdapterSpec

if TYPE_CHECKING:
    from multilora_store.assembly.fingerprint import BaseIdentity

__all__ = ["AssemblyRecord", "Member", "Origin", "Site", "carrier", "inside_name", "record", "rescan"]

_ATTRIBUTE: Final = "_multilora_record"
_carriers: WeakKeyDictionary[nn.Module, ReferenceType[PeftModel]] = WeakKeyDictionary()  # by the base inside
# Attributes of the containers that PEFT keys by adapter: an entry of such a name would shadow or clash with them.
_TAKEN: Final = frozenset(dir(nn.ModuleDict())) | frozenset(dir(nn.ParameterDict()))


def inside_name(name: str) -> str:
    """The name of adapter `name` inside the model; reversed by `adapter.name_from_module`.

    Beyond `module_name`, what torch's containers call their own (`train`, `keys`, `half`) is escaped too.
    """
    inside = module_name(name)
    return f"%{ord(inside[0]):02X}{inside[1:]}" if inside in _TAKEN else inside


@dataclass(frozen=True, slots=True)
class Site:
    """One PEFT layer: a target with its adapters, or a wrapper around a saved module or trainable tokens.

    Attributes:
        path: Its path from the innermost model, free of wrappers.
        layer: The layer; the object stays the same under every wrapper.
        containers: Its children that are keyed by adapter, by their names.
    """

    path: str
    layer: nn.Module
    containers: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What an adapter that is no stored version yet was made from.

    Attributes:
        parents: The versions (`name@version`).
        recipe: All that determines its content.
        metadata: What else is to stand beside it.
        digest: SHA-256 of the content that the recipe gives: of trained values it says nothing.
    """

    parents: tuple[str, ...]
    recipe: Mapping[str, Any]
    metadata: Mapping[str, Any]
    digest: str


@dataclass(slots=True, kw_only=True)
class Member:
    """One adapter of the set.

    Attributes:
        name: Its name in the set.
        inside: Its name inside the model.
        config: Its configuration, as stored.
        spec: Its entry in the manifest, None if it came another way.
        version: The stored version it was loaded from (`storage.Version`), None if there is none.
        origin: Of one without a version, what it was made from, where that is known.
    """

    name: str
    inside: str
    config: AdapterConfig
    spec: AdapterSpec | None = None
    version: Any = None
    origin: Origin | None = None


@dataclass(slots=True, kw_only=True)
class AssemblyRecord:
    """The set that a model carries.

    Attributes:
        members: By name, in the order of assembly.
        sites: Every PEFT layer of the model, in the model's order.
        weights: Weights of the active adapters, by name, as last set.
        notes: What was worth telling at assembly: dtypes that were changed, ties, unknown fields.
    """

    members: dict[str, Member] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _base: BaseIdentity | None = None
    _model: PeftModel | None = field(default=None, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the set, in order."""
        return tuple(self.members)

    @property
    def module_names(self) -> Mapping[str, str]:
        """Name in the set -> name inside the model."""
        return {name: member.inside for name, member in self.members.items()}

    @property
    def versions(self) -> Mapping[str, Any]:
        """Name -> the stored version it was loaded from, or None."""
        return {name: member.version for name, member in self.members.items()}

    @property
    def specs(self) -> Mapping[str, AdapterSpec | None]:
        """Name -> its entry in the manifest, or None."""
        return {name: member.spec for name, member in self.members.items()}

    @property
    def base(self) -> BaseIdentity:
        """Name, revision and fingerprint of the base."""
        if self._base is None:
            from multilora_store.assembly.fingerprint import identify

            assert self._model is not None, "a record belongs to a model"
            self._base = identify(self._model)
        return self._base

    @base.setter
    def base(self, identity: BaseIdentity) -> None:
        self._base = identity

    def member(self, name: str) -> Member:
        """The member called `name`.

        Raises:
            UsageError: the model carries no such adapter; the ones it carries are listed.
        """
        found = self.members.get(name)
        if found is None:
            remedy = choices(str(name), self.members, noun="adapter")
            raise UsageError(f"the model carries no adapter {name!r}", remedy=remedy, name=name)
        return found


def record(model: nn.Module) -> AssemblyRecord:
    """The record of the set that `model` carries.

    It is made on first use for a model that PEFT built, and follows what PEFT adds or deletes behind our back.
    """
    peft = peft_model(model)
    found: AssemblyRecord | None = peft.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = AssemblyRecord(_model=peft)
        peft.__dict__[_ATTRIBUTE] = found
    if [member.inside for member in found.members.values()] != list(peft.peft_config):
        _follow(peft, found)
    return found


def rescan(peft: PeftModel) -> None:
    """Collect the PEFT layers of `peft` anew, after the set has changed."""
    known: AssemblyRecord = peft.__dict__[_ATTRIBUTE]
    known._model = peft
    base = innermost(peft)
    known.sites = list(_scan(base))
    _carriers[base] = ref(peft)


def carrier(base: nn.Module) -> nn.Module:
    """What adapters are added to when `base` is given: the PeftModel around it if it carries some, else `base`.

    Raises:
        UsageError: it carries adapters, and the PeftModel that knows them is not to be found.
    """
    inside = unwrap(base)
    if isinstance(inside, PeftModel):
        return cast("nn.Module", inside)
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers = {id(module): (path, module) for path, module in walk(inside) if isinstance(module, kinds)}
    if not layers:
        return inside
    known = _carriers[inside]() if inside in _carriers else None
    if known is not None and layers.keys() <= {id(site.layer) for site in record(known).sites}:
        return cast("nn.Module", known)
    path, layer = next(iter(layers.values()))
    raise UsageError(
        f"this {type(inside).__name__} already carries adapters, but not as a PeftModel: "
        f"{path or 'the whole of it'} is a {type(layer).__name__} of PEFT",
        why="a second PeftModel around it would switch off the adapters that the first one still reports as active",
        remedy="pass the PeftModel around it to add to its set, or a base without adapters",
        module=path,
    )


def _follow(peft: PeftModel, found: AssemblyRecord) -> None:
    by_inside = {member.inside: member for member in found.members.values()}
    members: dict[str, Member] = {}
    for inside, config in peft.peft_config.items():
        member = by_inside.get(inside)
        if member is None:
            where = f"peft_config of {inside!r}"
            parsed = AdapterConfig.parse(config.to_dict(), where=where)
            member = Member(name=name_from_module(inside), inside=inside, config=parsed)
        members[member.name] = member
    found.members = members
    found.weights = {name: weight for name, weight in found.weights.items() if name in members}
    rescan(peft)


def _scan(base: nn.Module) -> list[Site]:
    """The PEFT layers of `base`, without a walk through what they hold for each adapter."""
    sites: list[Site] = []

    def descend(path: str, module: nn.Module) -> None:
        module = unwrap(module)
        children = module._modules
        if isinstance(module, (AuxiliaryTrainingWrapper, BaseTunerLayer)):
            sites.append(Site(path, module, tuple(_containers(module))))
            wrapped = isinstance(module, BaseTunerLayer) and "base_layer" in children
            children = {"base_layer": children["base_layer"]} if wrapped else {}
        for name, child in children.items():
            if child is not None:
                descend(f"{path}.{name}" if path else name, child)

    descend("", base)
    return sites


def _containers(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(layer, ModulesToSaveWrapper):
        yield "modules_to_save", layer.modules_to_save
        return
    if isinstance(layer, AuxiliaryTrainingWrapper):
        return
    for holder, child in layer._modules.items():
        if holder != "base_layer" and child is not None:
            container = unwrap(child)
            kept = isinstance(container, BufferDict) and container.persistent
            if kept or isinstance(container, (nn.ModuleDict, nn.ParameterDict)):
                yield holder, container
