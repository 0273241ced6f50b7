"""Exceptions as lines and exit codes: what, why, remedy; never a traceback unless HYDRA_FULL_ERROR=1 asks for it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # its stubs are another distribution

from multilora_store.cli.options import options_of
from multilora_store.cli.schema import SCHEMAS, AdapterEntry, Common
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
    """What was refused, the innermost cause that says so, then the valid choices where they are known."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    known = [link for link in chain if isinstance(link, (HydraException, OmegaConfBaseException))]
    told = next((link for link in reversed(known) if "$VALUE" not in str(link)), chain[-1])  # below: a template
    first, inner = first_line(error), first_line(told)
    lines = _no_choice(error) or _no_such_key(first, told, command)
    if not lines:
        lines = [first] if inner in first else [first, inner]
    if f"not a subclass of {AdapterEntry.__name__}" in inner:
        lines.append("an adapter is a mapping of fields, e.g. '+adapters={a: {source: a@best}}'")
    return [" ".join(line.split()) for line in lines if line]


def _no_choice(error: BaseException) -> list[str]:
    """A group that has no such choice: by name, or as one of a list."""
    from multilora_store.cli.choices import GROUPS
    from multilora_store.cli.plugins import shipped
    from multilora_store.plugins import default_registry

    missed = re.search(r"Could not (?:find|load) '([^']*)/([^'/]*)'", str(error))
    if missed is None:
        return []
    group, name = missed.groups()
    listed = re.search(r"Available options in '[^']*':\n((?:\t.*\n?)+)", str(error))
    valid = listed[1].split() if listed else []
    if not valid and group in GROUPS:
        valid = list(default_registry().names(GROUPS[group].kind))
    at_hand = shipped(GROUPS[group].kind, name) if group in GROUPS else None
    if at_hand is not None:
        return [f"{group}={name} is no choice yet", f"it comes in a drop-in that is shipped: add plugins=[{at_hand}]"]
    lines = [f"{group}={name} is no choice", choices(name, valid, noun=group)]
    return [*lines, f"for a store of that name: store.url={name}"] if group == "store" else lines


def _no_such_key(first: str, told: BaseException, command: str) -> list[str]:
    """A key that nothing reads, with the nearest that something does."""
    from multilora_store.cli.choices import GROUPS

    if not isinstance(told, (ConfigKeyError, ConfigAttributeError)):
        return []
    full, owner = str(told.full_key), told.object_type
    above, _, last = full.rpartition(".")
    home = GROUPS.get(full.partition(".")[0])
    if isinstance(owner, type) and issubclass(owner, Common) and command in SCHEMAS:
        typed = re.search(r"override '?([^'=]+)", first)
        wanted = typed[1].lstrip("+~").rstrip(".") if typed else full
        valid = [option.key for option in options_of(SCHEMAS[command])]
        return [f"{command} has no option {wanted}", choices(wanted, valid, noun="option")]
    if is_dataclass(owner):
        return [f"there is no {full}", choices(last, [item.name for item in fields(owner)], noun=f"key of {above}")]
    if above == "adapters":
        return [f"adapter {last!r} is not in the set", f"choose it too: '+adapters=[...,{last}]'"]
    if home is not None:
        spelled = home.choose.replace("steps.STEP", full).replace("NAME", last if home.several else "NAME")
        return [f"nothing is chosen for {full}", f"choose it first: {spelled}"]
    return []


def first_line(error: BaseException) -> str:
    """The first line of what it says."""
    return str(error).strip().partition("\n")[0]
