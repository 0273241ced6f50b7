"""Models: base providers, the one bridge to PEFT, injection, coverage checks, assemblers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilora_store.lazy import lazy

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

__getattr__ = lazy(__name__, _HOMES)
