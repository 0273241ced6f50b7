"""Exceptions as lines and exit codes: what, why, remedy; never a traceback unless HYDRA_FULL_ERROR=1 asks for it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # its stubs are another distribution

from multilora_store.cli.options import options_of
from multilora_store.cli.schema import SCHEMAS, AdapterEntry
from multilora_store.errors import MultiLoRAError, choices

__all__ = ["document_of", "exit_code", "first_line", "lines_of", "wants_traceback", "worst"]

_SEVERITY: Final = (0, 3, 2, 1)


def wants_traceback() -> bool:
    """Whether the user asked for the whole story."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def worst(codes: Sequence[int]) -> int:
    """The worst of several exit codes: failed, then bad usage, then problems found, then done."""
    return max(codes, default=0, key=lambda code: _SEVERITY.index(code) if code in _SEVERITY else len(_SEVERITY))


def exit_code(error: BaseException) -> int:
    """2 for what Hydra and OmegaConf refuse, the error's own code for ours, 1 for all else."""
    if isinstance(error, MultiLoRAError):
        return error.exit_code
    return 2 if _from_configuration(error) else 1


def lines_of(error: BaseException, command: str = "") -> list[str]:
    """What, why and remedy, one line each."""
    if isinstance(error, MultiLoRAError):
        return [" ".join(line.split()) for line in (error.what, error.why, error.remedy) if line]
    if isinstance(error, YAMLError):
        return [f"a config is not YAML: {' '.join(str(error).split())}"]
    if _from_configuration(error):
        return _hydra_lines(error, command)
    if isinstance(error, KeyboardInterrupt):
        return ["interrupted"]
    return [
        f"{type(error).__name__}: {first_line(error) or 'no message'}",
        "this is not an error that was foreseen",
        "HYDRA_FULL_ERROR=1 shows where it was raised",
    ]


def document_of(error: BaseException, command: str = "") -> dict[str, Any]:
    """The error for `output=json`: type, what, why, remedy, facts."""
    if isinstance(error, MultiLoRAError):
        parts = {"what": error.what, "why": error.why, "remedy": error.remedy}
        facts = {key: _plain(value) for key, value in error.facts.items()}
        return {"type": type(error).__name__, **parts, "facts": facts}
    what, *rest = lines_of(error, command)
    return {"type": type(error).__name__, "what": what, "why": " ".join(rest), "remedy": "", "facts": {}}


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple, set, frozenset)) else str(value)


def _from_configuration(error: BaseException) -> bool:
    """Whether Hydra or OmegaConf raised it; a stray TypeError counts when it comes out of their modules."""
    if isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)):
        return True
    if not isinstance(error, (TypeError, ValueError, AttributeError)):
        return False
    trace, last = error.__traceback__, ""
    while trace is not None:
        last = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return last.partition(".")[0] in {"hydra", "omegaconf"}


def _hydra_lines(error: BaseException, command: str) -> list[str]:
    """The first line and the innermost cause, then the valid choices where they are known."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    known = [link for link in chain if isinstance(link, (HydraException, OmegaConfBaseException))]
    first, inner = first_line(error), first_line((known or chain)[-1])  # below them a bare KeyError may lie
    lines = [first] if inner in first else [first, inner]
    missed = re.search(r"Could not find '([^']*)/([^'/]*)'", first)
    listed = re.search(r"Available options in '[^']*':\n((?:\t.*\n?)+)", str(error))
    if missed and listed:
        lines = [f"{missed[1]}={missed[2]} is no choice", choices(missed[2], listed[1].split(), noun=missed[1])]
        lines += [f"for a store of that name: store.url={missed[2]}"] if missed[1] == "store" else []
    lines += _near_misses(first, inner, command) + _valid_values(inner)
    return [" ".join(line.split()) for line in lines if line]


def _near_misses(first: str, inner: str, command: str) -> list[str]:
    if not re.search(r"Key '[^']*' (not in|is not in struct)", inner):
        return []
    key = re.search(r"override '?([^'=]+)", first)
    full = key[1].lstrip("+~").rstrip(".") if key else ""
    adapter = re.fullmatch(r"adapters\.([^.]+)\..*", full)
    if adapter and "struct" in inner:
        return [f"adapter {adapter[1]!r} is not in the set: choose it too, +adapters=[...,{adapter[1]}]"]
    known = re.search(r"not in '(\w+)'", inner)
    if command in SCHEMAS and (known is None or known[1].endswith("Options")):
        return [choices(full, [option.key for option in options_of(SCHEMAS[command])], noun="option")]
    if known and known[1] == AdapterEntry.__name__:
        return [f"fields of an adapter: {', '.join(AdapterEntry.__dataclass_fields__)}"]
    return [f"see {command} --help"]


def _valid_values(inner: str) -> list[str]:
    """What would do where OmegaConf tells only of its types."""
    if f"not a subclass of {AdapterEntry.__name__}" not in inner:
        return []
    return ["an adapter is a mapping of fields, e.g. '+adapters={a: {source: a@best}}'"]


def first_line(error: BaseException) -> str:
    """The first line of what it says."""
    return str(error).strip().partition("\n")[0]
