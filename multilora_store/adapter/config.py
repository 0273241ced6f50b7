"""`adapter_config.json`: read with care, kept as it is, and asked for ranks and scales."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from multilora_store.adapter.fields import LORA_FIELDS, OBSOLETE_FIELDS, PEFT_TYPES
from multilora_store.errors import ConfigError, choices

__all__ = ["AdapterConfig"]

MAX_BYTES: Final = 4 * 2**20
_IDENTITY_FREE: Final = frozenset({"peft_version", "inference_mode"})
_SET_LIKE: Final = frozenset({"target_modules", "exclude_modules", "modules_to_save", "layers_to_transform"})
_TOOLS: Final = {"fine_tune_type": "mlx-lm", "lora_parameters": "mlx-lm", "base_model": "LeRobot"}
_OWNER: Final = re.compile(r"(?:base_model\.model\.)?(.+?)\.lora_(?:embedding_)?[AB](?:\.\w+)?")
_TARGETS: Final = ("target_modules", "target_parameters", "modules_to_save", "trainable_token_indices")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The configuration of one PEFT adapter: the mapping as it stands in its file, checked.

    Attributes:
        raw: The mapping; unknown fields are kept.
        where: The file or place it came from, for messages.
        notes: What is worth a warning: fields that PEFT does not know or no longer knows.
    """

    raw: Mapping[str, Any]
    where: str = field(default="the given mapping", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, data: bytes | str | Mapping[str, Any], *, where: str = "the given mapping") -> AdapterConfig:
        """Read and check a configuration, without PEFT.

        Args:
            data: The file's content, or a mapping (sets are allowed where PEFT keeps sets).
            where: The place to name in errors.

        Raises:
            ConfigError: not JSON (with line and column), not an object, another tool's file, an unknown `peft_type`,
                or a field that PEFT would take in silence and that cannot be right.
        """
        if not isinstance(data, (bytes, str, Mapping)):
            raise ConfigError(
                f"{where} is {data!r:.80}, of type {type(data).__name__}",
                remedy="give the fields of a PEFT configuration as a mapping, or the bytes of an adapter_config.json",
            )
        raw = _plain(data, where) if isinstance(data, Mapping) else _read_json(data, where)
        kind = _check_peft_type(raw, where)
        _check_lists(raw, where)
        if kind == "LORA":
            _check_lora(raw, where)
        return cls(raw, where, _notes(raw, kind))

    @property
    def peft_type(self) -> str:
        """PEFT's name of the method, e.g. `LORA`."""
        return str(self.raw["peft_type"])

    @property
    def r(self) -> int:
        """The default rank; 0 for a method without one."""
        return int(self.raw.get("r") or 0)

    @property
    def lora_alpha(self) -> float:
        """The default alpha, PEFT's default of 8 where the field is absent."""
        return float(self.raw.get("lora_alpha", 8))

    @property
    def target_modules(self) -> str | tuple[str, ...] | None:
        """The targets: a regular expression, or sorted names, or None."""
        targets = self.raw.get("target_modules")
        return targets if targets is None or isinstance(targets, str) else tuple(sorted(targets))

    @property
    def base_model(self) -> str | None:
        """The base's name or path, as the file says."""
        name = self.raw.get("base_model_name_or_path")
        return None if name is None else str(name)

    @property
    def max_rank(self) -> int:
        """The highest rank that any module has."""
        return max([self.r, *map(int, (self.raw.get("rank_pattern") or {}).values())])

    def rank_for(self, path: str) -> int:
        """The rank of the module at `path` (`model.layers.0.self_attn.q_proj`), by `rank_pattern`."""
        return int(_by_pattern(self.raw.get("rank_pattern"), path, self.r))

    def alpha_for(self, path: str) -> float:
        """The alpha of the module at `path`, by `alpha_pattern`."""
        return float(_by_pattern(self.raw.get("alpha_pattern"), path, self.lora_alpha))

    def scaling_for(self, path: str) -> float:
        """The scale of the delta B A of the module at `path`: alpha / r, with rsLoRA alpha / sqrt(r).

        rsLoRA: Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA (arXiv 2312.03732).
        """
        rank = self.rank_for(path)
        return self.alpha_for(path) / (math.sqrt(rank) if self.raw.get("use_rslora") else rank)

    def canonical(self) -> dict[str, Any]:
        """What of it counts for identity: set-like fields sorted, without those that say nothing of the adapter."""
        return {
            key: sorted(value) if key in _SET_LIKE and isinstance(value, list) else value
            for key, value in self.raw.items()
            if key not in _IDENTITY_FREE
        }

    def to_json(self) -> bytes:
        """The bytes of an `adapter_config.json`: sorted keys, sorted sets, a final newline."""
        content = {**self.canonical(), **{key: self.raw[key] for key in _IDENTITY_FREE if key in self.raw}}
        return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def settled(self, names: Callable[[], Iterable[str]]) -> AdapterConfig:
        """The same configuration without patterns whose order decides, which identity, by sorted keys, does not know.

        PEFT takes the first pattern that matches a module. Where several match one and disagree, every module that any
        of them matches gets a pattern of its own.

        Args:
            names: Gives the canonical names of the adapter's tensors, where they are needed.

        Raises:
            ConfigError: it is so for an adapter of `target_parameters`, whose patterns name parameters.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name in ("rank_pattern", "alpha_pattern"):
            patterns: Mapping[str, Any] = self.raw.get(name) or {}
            if len(patterns) > 1:
                paths = {found[1] for found in map(_OWNER.fullmatch, names()) if found}
                values = {path: [patterns[key] for key in patterns if _matches(key, path)] for path in sorted(paths)}
                if any(len(set(found)) > 1 for found in values.values()):
                    changed[name] = {_exactly(path, paths): found[0] for path, found in values.items() if found}
        if changed and self.raw.get("target_parameters"):
            raise ConfigError(
                f"{self.where}: several patterns of {', '.join(changed)} match one module and disagree",
                remedy="write patterns of which only one matches each parameter",
            )
        return self.replace(**changed) if changed else self

    def replace(self, **fields: Any) -> AdapterConfig:
        """The same configuration with `fields` changed, checked anew."""
        return AdapterConfig.parse({**self.raw, **fields}, where=self.where)


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, default: float) -> float:
    # The rule of peft.utils.get_pattern_key: the first pattern that matches a suffix of the path wins.
    return next((float(value) for pattern, value in (patterns or {}).items() if _matches(pattern, path)), default)


def _matches(pattern: str, path: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def _exactly(path: str, paths: Collection[str]) -> str:
    """The pattern that matches this one of the paths."""
    ending = any(other.endswith(f".{path}") for other in paths)
    return f"{'^' if ending else ''}{re.escape(path)}"


def _plain(value: Any, where: str) -> Any:
    """`value` with sets, tuples and enums as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item, where) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    enumerated = getattr(value, "value", value)
    if enumerated is None or isinstance(enumerated, (bool, int, float, str)):
        return enumerated
    raise ConfigError(f"{where}: {value!r} of type {type(value).__name__} cannot stand in an adapter_config.json")


def _read_json(data: bytes | str, where: str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{where}: {len(data)} bytes are too many for an adapter_config.json", why=f"limit {MAX_BYTES}"
        )
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data.removeprefix("\ufeff")
        raw = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not JSON: {error.msg} at line {error.lineno} column {error.colno}",
            why="the file is empty" if not text.strip() else "",
            remedy="write the configuration again with PEFT's save_pretrained, or mend the file",
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply for an adapter_config.json") from error
    except _BadValueError as error:
        raise ConfigError(f"{where}: {error}", remedy="mend the file: PEFT would take it without a word") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: line 1 column 1: an object was expected, found {type(raw).__name__}")
    return raw


class _BadValueError(Exception):
    """A key or constant that JSON readers take in silence."""


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise _BadValueError(f"the key {twice[0]!r} stands in it twice")
    return mapping


def _no_constant(constant: str) -> None:
    raise _BadValueError(f"{constant} is not a number that a configuration may hold")


def _check_peft_type(raw: Mapping[str, Any], where: str) -> str:
    kind = raw.get("peft_type")
    if kind is None:
        tools = [tool for key, tool in _TOOLS.items() if key in raw]
        raise ConfigError(
            f"{where}: not a PEFT adapter: it has no peft_type",
            why=f"it looks like a file of {tools[0]}, which uses the same file name" if tools else "",
            remedy="convert it with that tool, or export it with PEFT's save_pretrained",
        )
    if kind not in PEFT_TYPES:
        raise ConfigError(
            f"{where}: unknown peft_type {kind!r}", remedy=choices(str(kind).upper(), PEFT_TYPES, noun="peft_type")
        )
    return str(kind)


def _check_lists(raw: Mapping[str, Any], where: str) -> None:
    """Fields that PEFT keeps as sets or lists hold items of one type, so that they can be sorted and matched."""
    for key in sorted(_SET_LIKE & set(raw)):
        item, found = (int, "numbers") if key == "layers_to_transform" else (str, "strings")
        value = raw[key]
        items = value if isinstance(value, list) else [] if value is None or value == {} else [value]
        if any(isinstance(each, bool) or not isinstance(each, item) for each in items):
            raise ConfigError(f"{where}: {key} = {value!r}, a list of {found} was expected")


def _check_lora(raw: Mapping[str, Any], where: str) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        if raw.get(name) and not isinstance(raw[name], Mapping):
            raise ConfigError(f"{where}: {name} = {raw[name]!r}, a mapping from patterns to numbers was expected")
    for name, ranks in (("r", {"r": raw.get("r", 8)}), ("rank_pattern", raw.get("rank_pattern") or {})):
        for key, rank in ranks.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                at = name if key == name else f"{name}[{key!r}]"
                raise ConfigError(f"{where}: {at} = {rank!r}, a rank is a whole number of at least 1")
    for name, alphas in (
        ("lora_alpha", {"lora_alpha": raw.get("lora_alpha", 8)}),
        ("alpha_pattern", raw.get("alpha_pattern") or {}),
    ):
        for key, alpha in alphas.items():
            if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
                at = name if key == name else f"{name}[{key!r}]"
                raise ConfigError(f"{where}: {at} = {alpha!r}, an alpha is a finite number")
    targets = raw.get("target_modules")
    if not any(raw.get(key) for key in _TARGETS):
        raise ConfigError(
            f"{where}: no targets", why=f"none of {', '.join(_TARGETS)} is set", remedy="name the modules it adapts"
        )
    if isinstance(targets, str) and targets != "all-linear":
        for key in ("layers_to_transform", "layers_pattern"):
            if raw.get(key) not in (None, []):
                raise ConfigError(
                    f"{where}: {key} cannot stand beside target_modules as the regular expression {targets!r}",
                    remedy="name the layers in the expression, or list the modules",
                )
    _check_expressions(raw, where)


def _check_expressions(raw: Mapping[str, Any], where: str) -> None:
    expressions = [(key, raw[key]) for key in ("target_modules", "exclude_modules") if isinstance(raw.get(key), str)]
    expressions += [(key, text) for key in ("rank_pattern", "alpha_pattern") for text in raw.get(key) or {}]
    for key, text in expressions:
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"{where}: {key} {text!r} is not a regular expression: {error}") from error


def _notes(raw: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    if kind != "LORA":
        return ()
    obsolete = sorted(set(raw) & OBSOLETE_FIELDS)
    unknown = sorted(set(raw) - LORA_FIELDS - OBSOLETE_FIELDS)
    notes = []
    if obsolete:
        notes.append(f"fields of an older PEFT, which PEFT now drops: {', '.join(obsolete)}")
    if unknown:
        notes.append(f"fields that PEFT does not know: {', '.join(unknown)}")
    return tuple(notes)
