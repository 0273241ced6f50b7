"""Places on this machine: where what can be made again is kept, and new folders that are whole or absent."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from multilora_store.errors import ExistsError, UsageError
from multilora_store.storage.failures import translated

__all__ = ["cache_folder", "cache_limit", "check_new_folder", "new_folder", "write_small"]


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


def check_new_folder(target: Path) -> None:
    """Raises ExistsError if something is there other than an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExistsError(f"the target {target} exists and is not empty", remedy="name a new folder, or empty this one")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, which takes its place at the end of the block, or goes with an error.

    Raises:
        ExistsError: see `check_new_folder`.
    """
    check_new_folder(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with translated("writing", str(target)):
        partial.mkdir(parents=True)
    try:
        yield partial
        with translated("writing", str(target)):
            os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
