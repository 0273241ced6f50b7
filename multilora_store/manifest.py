"""The declaration of a set of adapters (manifest), and the same with every reference resolved (lock)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from multilora_store.adapter import AdapterConfig, Ref, check_name, source_kind
from multilora_store.errors import ManifestError, choices

__all__ = ["DTYPES", "AdapterSpec", "Lock", "LockEntry", "Manifest"]

DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
IF_MISSING: Final = ("error", "init")
LOCK_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """One adapter of a set: where it comes from and in which state it joins.

    Attributes:
        name: Its name in the set.
        source: A reference (`a@best`), a path (`/…`, `./…`) or a URL of a PEFT directory; its own name if not given.
        store: URL of another store for this entry, or None.
        if_missing: `error`, or `init`: create it from `config`.
        config: Fields of a PEFT configuration, for `init`.
        active: Whether it takes part in the forward.
        trainable: Whether it receives gradients.
        weight: Its share when it is active.
        dtype: `float32`, `bfloat16`, ..., or None: as stored.
    """

    name: str
    source: str = ""
    store: str | None = None
    if_missing: str = "error"
    config: Mapping[str, Any] | None = None
    active: bool = True
    trainable: bool = False
    weight: float = 1.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        object.__setattr__(self, "source", self.source or self.name)
        _check_types(self)
        if source_kind(self.source) == "ref" and "*" not in self.source:
            Ref.parse(self.source)
        _check_choice(self, "if_missing", self.if_missing, IF_MISSING)
        if self.dtype is not None:
            _check_choice(self, "dtype", self.dtype, DTYPES)
        if not math.isfinite(self.weight):
            raise ManifestError(f"adapter {self.name!r}: weight {self.weight!r} is not finite")
        if self.if_missing == "init" and self.config is None:
            raise ManifestError(
                f"adapter {self.name!r}: if_missing: init needs a config to create it from",
                remedy="add config: {r: 8, lora_alpha: 16, target_modules: [q_proj, v_proj]}",
            )
        if self.config is not None:
            self.adapter_config()

    @classmethod
    def from_value(cls, name: str, value: object) -> AdapterSpec:
        """Build one entry from a source string, a mapping of fields, or an `AdapterSpec`.

        Raises:
            ManifestError: an unknown field, a wrong type or a value that cannot be right.
        """
        if isinstance(value, AdapterSpec):
            return replace(value, name=name, source=value.source)
        if isinstance(value, str):
            return cls(name=name, source=value)
        if value is None:
            return cls(name=name)
        if not isinstance(value, Mapping):
            raise ManifestError(
                f"adapter {name!r}: a mapping of fields was expected, found {type(value).__name__} {value!r}",
                remedy="write {source: a@latest, trainable: true}, or just the source",
            )
        valid = [item.name for item in fields(cls) if item.name != "name"]
        for key in value:
            if key not in valid:
                why = "nothing in a manifest is instantiated" if str(key).startswith("_") else ""
                raise ManifestError(
                    f"adapter {name!r}: unknown field {key!r}", why=why, remedy=choices(str(key), valid, noun="field")
                )
        given = {key: item for key, item in value.items() if not (key == "source" and item is None)}
        return cls(name=name, **given)

    def adapter_config(self) -> AdapterConfig:
        """`config` as a checked configuration; `peft_type` is LORA unless it says otherwise."""
        return AdapterConfig.parse(
            {"peft_type": "LORA", **(self.config or {})}, where=f"config of adapter {self.name!r}"
        )


_TYPES: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "source": ((str,), "a string"),
    "store": ((str, type(None)), "a URL or null"),
    "if_missing": ((str,), "a string"),
    "config": ((Mapping, type(None)), "a mapping or null"),
    "active": ((bool,), "true or false"),
    "trainable": ((bool,), "true or false"),
    "weight": ((int, float), "a number"),
    "dtype": ((str, type(None)), "a string or null"),
}


def _check_types(spec: AdapterSpec) -> None:
    for key, (kinds, words) in _TYPES.items():
        value = getattr(spec, key)
        if not isinstance(value, kinds) or (key == "weight" and isinstance(value, bool)):
            raise ManifestError(f"adapter {spec.name!r}: {key} must be {words}, found {type(value).__name__} {value!r}")


def _check_choice(spec: AdapterSpec, key: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ManifestError(f"adapter {spec.name!r}: unknown {key} {value!r}", remedy=choices(value, valid, noun=key))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A set of adapters in order, by name.

    Attributes:
        adapters: The entries; the order is the order of assembly.
    """

    adapters: Mapping[str, AdapterSpec]

    @classmethod
    def from_mapping(cls, mapping: object) -> Manifest:
        """Read `{name: source | fields | AdapterSpec}`.

        Raises:
            ManifestError: not a mapping, empty, names equal but for case, or a wrong entry.
        """
        if not isinstance(mapping, Mapping):
            raise ManifestError(
                f"a manifest is a mapping from names to entries, found {type(mapping).__name__} {mapping!r}",
                remedy="write {a: {source: a@latest}, b: {source: b@best}}",
            )
        if not mapping:
            raise ManifestError("the manifest is empty", remedy="choose adapters, e.g. +adapters=[a,b]")
        adapters = {str(name): AdapterSpec.from_value(str(name), value) for name, value in mapping.items()}
        folded: dict[str, str] = {}
        for name in adapters:
            other = folded.setdefault(name.casefold(), name)
            if other != name:
                raise ManifestError(f"adapters {other!r} and {name!r} differ by case only", remedy="rename one of them")
        return cls(adapters)

    def __iter__(self) -> Iterator[AdapterSpec]:
        return iter(self.adapters.values())

    def __len__(self) -> int:
        return len(self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEntry:
    """One entry of a manifest with its reference resolved.

    Attributes:
        spec: The entry as declared.
        version: The version's id, or None: created fresh, or read from a plain PEFT directory.
        digest: The content's full SHA-256, None for a fresh adapter.
        store: URL of the store that holds it, None where no store does.
    """

    spec: AdapterSpec
    version: str | None = None
    digest: str | None = None
    store: str | None = None

    @property
    def name(self) -> str:
        """Its name in the set."""
        return self.spec.name

    @property
    def fresh(self) -> bool:
        """Whether it is to be created from its config."""
        return self.digest is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A manifest in which every reference is a version: the same set on every machine and rank.

    Attributes:
        entries: By name, in the manifest's order.
        snapshot: The snapshot it was taken from, if any.
    """

    entries: Mapping[str, LockEntry]
    snapshot: str | None = None

    def __iter__(self) -> Iterator[LockEntry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def manifest(self) -> Manifest:
        """The manifest that it locks."""
        return Manifest({name: entry.spec for name, entry in self.entries.items()})

    def to_json(self) -> str:
        """The lock as a JSON document that `from_json` reads."""
        adapters = {
            name: {
                **{key: value for key, value in asdict(entry.spec).items() if key != "name"},
                "locked": {"version": entry.version, "digest": entry.digest, "store": entry.store},
            }
            for name, entry in self.entries.items()
        }
        document = {"lock": LOCK_FORMAT, "snapshot": self.snapshot, "adapters": adapters}
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "the lock") -> Lock:
        """Read a lock.

        Raises:
            ManifestError: not a lock, or a lock of a newer format.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"{where}: not JSON: {error}") from error
        if not isinstance(document, Mapping) or "lock" not in document:
            raise ManifestError(f"{where}: not a lock", remedy="write one with assemble ... lock=FILE")
        if document["lock"] != LOCK_FORMAT:
            raise ManifestError(
                f"{where}: lock format {document['lock']!r}, this version reads {LOCK_FORMAT}",
                remedy="read it with the version that wrote it",
            )
        adapters = document.get("adapters")
        if not isinstance(adapters, Mapping) or not adapters:
            raise ManifestError(f"{where}: it names no adapters")
        entries = {str(name): _entry(str(name), value, where) for name, value in adapters.items()}
        return cls(entries=entries, snapshot=document.get("snapshot"))


def _entry(name: str, value: object, where: str) -> LockEntry:
    if not isinstance(value, Mapping) or not isinstance(value.get("locked"), Mapping):
        raise ManifestError(f"{where}: adapter {name!r} is not locked")
    spec = AdapterSpec.from_value(name, {key: item for key, item in value.items() if key != "locked"})
    locked = value["locked"]
    for key in ("version", "digest", "store"):
        if not isinstance(locked.get(key), (str, type(None))):
            raise ManifestError(f"{where}: adapter {name!r}: {key} must be a string or null, found {locked[key]!r}")
    if stray := sorted(map(str, set(locked) - {"version", "digest", "store"})):
        raise ManifestError(
            f"{where}: adapter {name!r}: locked holds {', '.join(stray)}", remedy="valid: version, digest, store"
        )
    if locked.get("digest") is None and (locked.get("version") is not None or spec.if_missing != "init"):
        raise ManifestError(
            f"{where}: adapter {name!r} is locked without a digest",
            why="without one it would be created anew instead of read",
            remedy="write the lock again with assemble ... lock=FILE",
            name=name,
        )
    return LockEntry(spec=spec, version=locked.get("version"), digest=locked.get("digest"), store=locked.get("store"))
