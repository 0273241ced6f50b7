"""What a merge strategy is: a pure function with stated traits; how it is found and its parameters are checked."""

from __future__ import annotations

import logging
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, NoneType
from typing import Any, Final, Literal, TypeVar

from multilora_store.errors import MergeError, PluginError, choices
from multilora_store.plugins import Plugin, Registry, default_registry

__all__ = ["BETWEEN_0_AND_1", "NOT_NEGATIVE", "Interval", "Strategy", "Traits", "strategy"]

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
Space = Literal["delta", "elements", "factor"]
_TRAITS: Final = "__merge_traits__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The values that a numeric parameter may have.

    Attributes:
        low, high: The ends.
        open_low: Whether `low` itself is outside.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        left = f"more than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return left if math.isinf(self.high) else f"{left} and at most {self.high:g}"


BETWEEN_0_AND_1: Final = Interval(low=0.0, high=1.0, open_low=True)
NOT_NEGATIVE: Final = Interval(low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the engine must know of a strategy beside its function.

    Attributes:
        citation: The paper, or the implementation whose semantics it has.
        space: What the function is defined on, and so what it is called with. `delta`: the weight deltas as
            `LowRank`, returning a `LowRank`. `elements`: the elements of the dense deltas, as `Block`s of rows,
            returning a tensor of the block's shape; the engine streams the blocks and brings the result to rank.
            `factor`: the same, called for the factors A and B apart: no function of the deltas.
        default_rank: The rank of a module where none is asked for: the sum of its adapters' ranks, or their maximum.
        fixed_rank: The rank follows from the strategy and may not be asked for.
        additive: A weighted sum of the deltas with the weights as coefficients, so that `lora_bias` can follow it.
        shares: The weights are shares, only their ratios count, and none may be negative. An adapter without a delta in
            a module stands there with a zero delta; for other strategies it is left out, which is the same for a sum.
        fewest, most: How many adapters it takes; `most` None for any number.
        experts: Whether it takes grouped experts (`target_parameters`).
        neutral: Parameters at which one adapter with weight 1 comes out as it went in.
        limits: Parameter -> the values it may have.
    """

    citation: str
    space: Space = "delta"
    default_rank: Literal["sum", "max"] = "sum"
    fixed_rank: bool = False
    additive: bool = False
    shares: bool = False
    fewest: int = 1
    most: int | None = None
    experts: bool = True
    neutral: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, Interval] = field(default_factory=lambda: MappingProxyType({}))


def strategy(**traits: Any) -> Callable[[F], F]:
    """State the traits of the decorated merge function (fields of `Traits`); the function stays as it is."""

    def mark(function: F) -> F:
        setattr(function, _TRAITS, Traits(**traits))
        return function

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A merge function under its name.

    Attributes:
        name: What users choose it by.
        function: `function(deltas, weights, *, parameters)`; see `Traits.space`.
        traits: What it states about itself.
    """

    name: str
    function: Callable[..., Any]
    traits: Traits

    @classmethod
    def find(cls, name: str, registry: Registry | None = None) -> Strategy:
        """The strategy of that name, built-in or plugin.

        Raises:
            PluginError: there is none; the valid names are listed.
        """
        return cls.from_plugin((registry or default_registry()).get("merge_strategy", name))

    @classmethod
    def every(cls, registry: Registry) -> list[Strategy]:
        """All strategies, by name; one that cannot be loaded is named in a warning and left out."""
        found = []
        for name in registry.names("merge_strategy"):
            try:
                found.append(cls.find(name, registry))
            except PluginError as error:
                logger.warning("%s", error.what)
        return found

    @classmethod
    def from_plugin(cls, plugin: Plugin) -> Strategy:
        """The strategy that a plugin declares; without `@strategy` it works on deltas and cites its origin."""
        function = plugin.load()
        traits = getattr(function, _TRAITS, None) or Traits(citation=plugin.origin)
        return cls(name=plugin.name, function=function, traits=traits)

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with defaults filled in, checked against the signature.

        Raises:
            MergeError: an unknown parameter, a missing one, a wrong type, a value outside its limits.
        """
        hints = typing.get_type_hints(self.function)
        known = {item.name: item for item in self._plugin().parameters}
        for name in given:
            if name not in known:
                raise MergeError(
                    f"strategy {self.name!r} has no parameter {name!r}",
                    remedy=choices(name, known, noun="parameter"),
                    parameter=name,
                )
        complete = {}
        for name, item in known.items():
            value = given.get(name, item.default)
            if value is item.REQUIRED:
                raise MergeError(f"strategy {self.name!r} needs the parameter {name!r}", parameter=name)
            complete[name] = self._checked(name, value, hints.get(name, Any))
        return complete

    def _plugin(self) -> Plugin:
        return Plugin(kind="merge_strategy", name=self.name, target=self.function, origin="")

    def _checked(self, name: str, value: Any, hint: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and hint is float:
            value = float(value)
        if not _fits(value, hint):
            raise MergeError(
                f"strategy {self.name!r}: {name} = {value!r} is not {_spell(hint)}", parameter=name, value=value
            )
        limits = self.traits.limits.get(name)
        if limits is not None and value is not None and value not in limits:
            raise MergeError(
                f"strategy {self.name!r}: {name} = {value!r} is out of range",
                remedy=f"{name} is {limits}",
                parameter=name,
                value=value,
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise MergeError(f"strategy {self.name!r}: {name} = {value!r} is not a finite number", parameter=name)
        return value


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return value in options
    if options and NoneType in options:
        return value is None or any(_fits(value, option) for option in options if option is not NoneType)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, hint) if isinstance(hint, type) else True


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return f"of type {hint.__name__}" if isinstance(hint, type) else f"of type {hint}"
