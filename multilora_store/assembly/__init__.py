"""Models: base providers, the one bridge to PEFT, injection, coverage checks, assemblers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multilora_store.assembly.assembler import assemble
    from multilora_store.assembly.bases import build_base, demo_adapters
    from multilora_store.assembly.fingerprint import BaseIdentity, base_fingerprint, same_base
    from multilora_store.assembly.resolve import resolve_manifest

_HOMES = {
    "BaseIdentity": "fingerprint",
    "assemble": "assembler",
    "base_fingerprint": "fingerprint",
    "build_base": "bases",
    "demo_adapters": "bases",
    "resolve_manifest": "resolve",
    "same_base": "fingerprint",
}

__all__ = [
    "BaseIdentity",
    "assemble",
    "base_fingerprint",
    "build_base",
    "demo_adapters",
    "resolve_manifest",
    "same_base",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
