"""Where this user's machine keeps what can be made again: probes' answers, copies of remote versions."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from multilora_store.errors import UsageError
from multilora_store.storage.failures import translated

__all__ = ["cache_folder", "cache_limit", "write_small"]


def cache_folder() -> Path:
    """The cache: MULTILORA_CACHE, or `multilora_store` under XDG_CACHE_HOME or `~/.cache`."""
    given = os.environ.get("MULTILORA_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "multilora_store"


def cache_limit() -> int:
    """How many bytes of copies the cache keeps: MULTILORA_CACHE_GB, or 50 GB.

    Raises:
        UsageError: the variable is not a number of gigabytes.
    """
    text = os.environ.get("MULTILORA_CACHE_GB", "50")
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not 0 <= gigabytes < 1e9:
        raise UsageError(
            f"MULTILORA_CACHE_GB is {text!r}", remedy="give the gigabytes that the cache may keep, or unset it"
        )
    return int(gigabytes * 1e9)


def write_small(path: Path, data: bytes) -> None:
    """Writes a small file of the cache whole or not at all; it need not survive a power cut."""
    with translated("writing", str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
