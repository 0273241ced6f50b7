"""Adapters on the Hugging Face hub: `hf://org/repo@revision/folder`, offline from its cache."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote

from multilora_store.errors import StorageUnreachableError, UsageError
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.dialects.foreign import source
from multilora_store.storage.peft_dirs import PeftFolder, read_peft_dir

__all__ = ["read_hf"]

_ADDRESS: Final = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[^/@]+))?(?:/(?P<folder>[^@]+?))?/?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@source("hf")
def read_hf(location: str, *, offline: bool | None = None, allow_pickle: bool = False) -> PeftFolder:
    """Read a PEFT folder of a hub repository: a pinned commit from the cache if it is there, else over the network.

    Args:
        location: `org/repo`, `org/repo@revision`, `org/repo@revision/folder`; a revision is a branch, tag or commit,
            a slash in it is `%2F`.
        offline: Only read the cache; None: as HF_HUB_OFFLINE says.
        allow_pickle: Also reads an `adapter_model.bin`, with weights-only loading.

    Raises:
        UsageError: not such an address, or no adapter is there.
        StorageUnreachableError: offline, and the cache does not hold it.
        DamagedError, ConfigError: what is there is broken.
    """
    found = _ADDRESS.fullmatch(location)
    if found is None:
        raise UsageError(f"hf://{location} is no address on the hub", remedy="write hf://org/repo@revision/folder")
    repo, folder = found["repo"], found["folder"] or ""
    revision = unquote(found["revision"]) if found["revision"] else "main"
    if offline is None:
        from huggingface_hub import constants

        offline = bool(constants.HF_HUB_OFFLINE)
    cached = _cached(repo, revision, folder) if offline or _COMMIT.fullmatch(revision) else None
    if cached is not None:
        return read_peft_dir(cached, allow_pickle=allow_pickle)
    if offline:
        raise StorageUnreachableError(
            f"hf://{repo}@{revision} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it",
            remedy=f"fetch it once while online: hf download {repo} --revision {revision}",
        )
    url = f"hf://{repo}@{quote(revision, safe='')}" + (f"/{folder}" if folder else "")
    try:
        return read_peft_dir(url, allow_pickle=allow_pickle)
    except UsageError as error:
        raise UsageError(
            error.what,
            why=error.why,
            remedy="check the name, the revision and the folder; a private or gated repository needs HF_TOKEN",
            **error.facts,
        ) from error


def _cached(repo: str, revision: str, folder: str) -> str | None:
    """The folder in the hub's cache that holds both files of the adapter, or None."""
    from huggingface_hub import try_to_load_from_cache

    stem = f"{folder}/" if folder else ""
    paths = [try_to_load_from_cache(repo, stem + file, revision=revision) for file in (CONFIG_FILE, MODEL_FILE)]
    if not all(isinstance(path, str) for path in paths):
        return None
    return str(paths[0]).rpartition(CONFIG_FILE)[0].rstrip("/\\")
