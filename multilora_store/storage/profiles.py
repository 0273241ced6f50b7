"""Profiles: whether another program would take an adapter as it is, why not, and what it must be set to for a set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from multilora_store.adapter import AdapterConfig, Ref
from multilora_store.errors import UsageError, choices
from multilora_store.storage.placement import Placement, place
from multilora_store.storage.vllm_rules import (
    RANK_STEPS,
    ProfileFinding,
    Shapes,
    adapted_modules,
    highest_rank,
    lint_vllm,
    rank_setting,
)

if TYPE_CHECKING:
    from multilora_store.storage.store import Store

__all__ = [
    "PROFILES",
    "Profile",
    "ProfileFinding",
    "ProfileReport",
    "SetNeeds",
    "check_profile",
    "lint",
    "set_needs",
    "verify_profile",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A program that serves adapters.

    Attributes:
        name: What users choose it by.
        description: One line.
        rules: `rules(config, shapes, *, max_rank)`: what it would refuse, or do in silence, and why.
        setting: The name of the setting that bounds the rank.
        steps: The values that this setting may have, ascending.
    """

    name: str
    description: str
    rules: Callable[..., Iterator[ProfileFinding]]
    setting: str
    steps: tuple[int, ...]


PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        "vllm": Profile(
            name="vllm",
            description="what vLLM 0.33 takes as an adapter directory",
            rules=lint_vllm,
            setting="--max-lora-rank",
            steps=RANK_STEPS,
        )
    }
)
"""Profiles by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNeeds:
    """What a server must be set to before it loads any adapter of a set, for it allocates once.

    Attributes:
        max_rank: The highest rank of any module of any adapter.
        setting: The smallest allowed value of the server's rank setting; None where the rank is above all of them.
        targets: The last names of all modules that any adapter of the set adapts, sorted.
        ranks: The highest rank of each adapter.
    """

    max_rank: int
    setting: int | None
    targets: tuple[str, ...]
    ranks: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "max_rank": self.max_rank, "setting": self.setting, "targets": list(self.targets), "ranks": dict(self.ranks)
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """What a profile says about a set.

    Attributes:
        profile: Its name.
        adapters: Reference -> findings, the severest first.
        needs: What the set as a whole needs.
    """

    profile: str
    adapters: Mapping[str, tuple[ProfileFinding, ...]]
    needs: SetNeeds

    @property
    def findings(self) -> tuple[ProfileFinding, ...]:
        """All findings."""
        return tuple(finding for findings in self.adapters.values() for finding in findings)

    @property
    def ok(self) -> bool:
        """Whether every adapter would be served as it was trained."""
        return not any(finding.severity == "error" for finding in self.findings)

    def summary(self) -> dict[str, Any]:
        """In few words, for a record: whether all are served, what the server is set to, and codes by adapter."""
        codes = {name: sorted({finding.code for finding in found}) for name, found in self.adapters.items() if found}
        return {"ok": self.ok, "max_rank": self.needs.max_rank, "setting": self.needs.setting, "findings": codes}

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile,
            "ok": self.ok,
            "adapters": {ref: [finding.to_json() for finding in found] for ref, found in self.adapters.items()},
            "needs": self.needs.to_json(),
        }


def lint(
    config: AdapterConfig,
    shapes: Shapes,
    *,
    profile: str = "vllm",
    max_rank: int | None = None,
    layout: Iterable[str] | None = None,
    targets: Iterable[str] | None = None,
) -> tuple[ProfileFinding, ...]:
    """What the program of `profile` would make of one adapter, from names and shapes alone; no value is read.

    Args:
        config: The adapter's configuration.
        shapes: Tensor name -> shape, as in its file.
        profile: The name of a profile.
        max_rank: What the server's rank setting is; None: whatever the adapter needs.
        layout: Names of all modules of the served base; None: not known, coverage is not looked at.
        targets: Last names of the modules that the server is restricted to; None: no restriction.

    Returns:
        Findings, errors first; empty if the adapter would be served as it was trained.

    Raises:
        UsageError: there is no such profile.
    """
    found = list(_profile(profile).rules(config, shapes, max_rank=max_rank))
    paths = adapted_modules(shapes)
    if layout is not None:
        found += _placement_faults(place(paths, layout))
    if targets is not None:
        found += _target_faults(paths, set(targets))
    return tuple(sorted(found, key=lambda finding: (_ORDER[finding.severity], finding.code, finding.what)))


_ORDER: Final[Mapping[Literal["error", "warning"], int]] = {"error": 0, "warning": 1}


def set_needs(adapters: Mapping[str, tuple[AdapterConfig, Shapes]], *, profile: str = "vllm") -> SetNeeds:
    """What a server needs for all of these adapters together.

    Raises:
        UsageError: there is no such profile.
    """
    steps = _profile(profile).steps
    ranks = {name: highest_rank(config, shapes) for name, (config, shapes) in adapters.items()}
    most = max(ranks.values(), default=0)
    targets = {path.rpartition(".")[2] for _, shapes in adapters.values() for path in adapted_modules(shapes)}
    return SetNeeds(max_rank=most, setting=rank_setting(most, steps), targets=tuple(sorted(targets)), ranks=ranks)


def verify_profile(
    store: Store,
    refs: Sequence[str | Ref] | None = None,
    *,
    profile: str = "vllm",
    max_rank: int | None = None,
    layout: Iterable[str] | None = None,
    targets: Iterable[str] | None = None,
) -> ProfileReport:
    """Lint stored adapters against a profile; only configurations and headers are read.

    Args:
        store: The store.
        refs: The adapters; None: the newest version of each.
        profile: The name of a profile.
        max_rank, layout, targets: See `lint`.

    Raises:
        UsageError: there is no such profile.
        NotInStoreError: a reference names nothing.
        DamagedError: a file is not what was stored.
    """
    adapters: dict[str, tuple[AdapterConfig, Shapes]] = {}
    _profile(profile)
    for name in map(str, store.names() if refs is None else refs):
        stored = store.get(name)
        adapters[name] = stored.config, {key: info.shape for key, info in stored.infos.items()}
    return check_profile(adapters, profile=profile, max_rank=max_rank, layout=layout, targets=targets)


def check_profile(
    adapters: Mapping[str, tuple[AdapterConfig, Shapes]],
    *,
    profile: str = "vllm",
    max_rank: int | None = None,
    layout: Iterable[str] | None = None,
    targets: Iterable[str] | None = None,
) -> ProfileReport:
    """Lint a set of adapters, wherever they are.

    Args:
        adapters: Name -> configuration, and shapes by tensor name.
        profile: The name of a profile.
        max_rank, layout, targets: See `lint`.

    Raises:
        UsageError: there is no such profile.
    """
    known = None if layout is None else frozenset(layout)
    allowed = None if targets is None else frozenset(targets)
    return ProfileReport(
        profile=profile,
        adapters={
            name: lint(config, shapes, profile=profile, max_rank=max_rank, layout=known, targets=allowed)
            for name, (config, shapes) in adapters.items()
        },
        needs=set_needs(adapters, profile=profile),
    )


def _profile(name: str) -> Profile:
    if name not in PROFILES:
        raise UsageError(f"unknown profile {name!r}", remedy=choices(name, PROFILES, noun="profile"), profile=name)
    return PROFILES[name]


def _placement_faults(found: Placement) -> Iterator[ProfileFinding]:
    if found.complete:
        return
    share = f"{len(found.matched)} of {len(found.matched) + len(found.unmatched)}"
    near = f"pass rename={dict(found.rename)!r}" if found.rename else "export it for the base that it was trained on"
    yield ProfileFinding(
        severity="error",
        code="coverage",
        what=f"{share} adapted modules are modules of the served base; not there: {_some(found.unmatched)}",
        why="a server drops the others without a word and answers with the base's own output",
        remedy=f"names differ by their beginning only: {near}" if found.rename else near,
    )


def _target_faults(paths: Sequence[str], targets: set[str]) -> Iterator[ProfileFinding]:
    ignored = [path for path in paths if path.rpartition(".")[2] not in targets]
    if ignored:
        yield ProfileFinding(
            severity="error",
            code="targets",
            what=f"{len(ignored)} of {len(paths)} adapted modules are outside the server's targets: {_some(ignored)}",
            why=f"the server is restricted to {', '.join(sorted(targets))}, and drops the others without a word",
            remedy=f"add {', '.join(sorted({path.rpartition('.')[2] for path in ignored}))} to its targets",
        )


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
