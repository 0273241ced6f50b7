"""Every error of the library, in one tree.

::

    MultiLoRAError                         exit code 1
    ├── UsageError          (ValueError)   exit code 2: bad configuration or usage
    │   ├── NameNotAllowedError            an adapter's, tag's or segment's name breaks the rules
    │   ├── ConfigError                    an adapter_config.json that is broken or not PEFT's
    │   ├── ManifestError                  the declaration of the set is wrong
    │   ├── PluginError                    a plugin is unknown, broken, duplicate or of the wrong kind
    │   └── MergeError                     weights, parameters or adapters that a merge cannot take
    ├── StoreError
    │   ├── StoreNotFoundError  (FileNotFoundError)   the root is not a store
    │   ├── StoreFormatError               written by a newer format, or a record that is not what it claims
    │   ├── NotInStoreError     (LookupError)   an adapter, version, tag or snapshot that is not there
    │   │   └── PurgedError                it was there; a purge entry removed it
    │   ├── ExistsError         (FileExistsError)     a name or tag that must be new is taken
    │   ├── ProtectedError                 a tag or snapshot still names what was to be deleted
    │   ├── ConflictError                  another writer decided otherwise; nothing was written
    │   ├── DamagedError        (ValueError)   truncated, altered, pickled or otherwise not the bytes we wrote
    │   │   └── ReplicaIncompleteError     a replica holds an entry but not yet its files
    │   ├── UntrustedError                 unsigned, or signed by none of the trusted keys
    │   ├── OutcomeUnknownError            the commit may or may not have happened
    │   └── StorageError        (OSError)  the storage itself failed
    │       ├── StorageDeniedError  (PermissionError)  no permission, expired or missing credentials
    │       ├── StorageFullError           no space left, quota exceeded
    │       └── StorageUnreachableError (ConnectionError)  endpoint, bucket or network not there
    ├── AssemblyError
    │   ├── BaseModelError                 the base cannot be built
    │   ├── BaseMismatchError              the adapter was made for another base
    │   ├── CoverageError                  keys missing, unexpected or of the wrong shape
    │   └── UnsupportedError               a kind of adapter or model that is refused, before anything is touched
    └── DistributedError
        ├── DisagreementError              ranks were given different things
        ├── RankFailedError                another rank failed; this one stopped with it
        ├── ShardedModelError              a call that would break a sharded model
        └── AuditError                     the audit of a model found faults

Each error says in one line each what went wrong, why, and what would do; facts stand as attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar

__all__ = [
    "AssemblyError",
    "AuditError",
    "BaseMismatchError",
    "BaseModelError",
    "ConfigError",
    "ConflictError",
    "CoverageError",
    "DamagedError",
    "DisagreementError",
    "DistributedError",
    "ExistsError",
    "ManifestError",
    "MergeError",
    "MultiLoRAError",
    "NameNotAllowedError",
    "NotInStoreError",
    "OutcomeUnknownError",
    "PluginError",
    "ProtectedError",
    "PurgedError",
    "RankFailedError",
    "ReplicaIncompleteError",
    "ShardedModelError",
    "StorageDeniedError",
    "StorageError",
    "StorageFullError",
    "StorageUnreachableError",
    "StoreError",
    "StoreFormatError",
    "StoreNotFoundError",
    "UnsupportedError",
    "UntrustedError",
    "UsageError",
    "choices",
]


class MultiLoRAError(Exception):
    """Base of every error here: `what` happened, `why`, the `remedy`, and the facts as `facts`.

    Args:
        what: One line that names the thing and what was found.
        why: One line with the reason, may be empty.
        remedy: One line with what would do, may be empty.
        facts: Anything a caller may want to inspect (`error.facts["name"]`).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, why: str = "", remedy: str = "", **facts: Any) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.remedy = remedy
        self.facts = facts

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.remedy) if line)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.why, self.remedy, self.facts)


def _rebuild(kind: type[MultiLoRAError], what: str, why: str, remedy: str, facts: dict[str, Any]) -> MultiLoRAError:
    return kind(what, why=why, remedy=remedy, **facts)


class UsageError(MultiLoRAError, ValueError):
    """Bad configuration or usage: nothing was read or written."""

    exit_code: ClassVar[int] = 2


class NameNotAllowedError(UsageError):
    """A name breaks the rules for names."""


class ConfigError(UsageError):
    """An adapter's configuration is broken, or belongs to another tool."""


class ManifestError(UsageError):
    """The manifest is wrong: unknown fields, wrong types, duplicates, cycles."""


class PluginError(UsageError):
    """A plugin is unknown, broken, duplicate or of the wrong kind."""


class MergeError(UsageError):
    """A merge was asked for that cannot be done as asked."""


class StoreError(MultiLoRAError):
    """Something about the store; what was there before is still there."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """The root is not a store."""


class StoreFormatError(StoreError):
    """A newer format, an unknown feature, or a record that breaks the format."""


class NotInStoreError(StoreError, LookupError):
    """An adapter, version, tag or snapshot that the store does not hold."""


class PurgedError(NotInStoreError):
    """The version existed; a purge entry of the journal removed its files."""


class ExistsError(StoreError, FileExistsError):
    """A name or tag that must be new is taken."""


class ProtectedError(StoreError):
    """A tag or a snapshot still names what was to be deleted."""


class ConflictError(StoreError):
    """Another writer got there first and the decision no longer holds."""


class DamagedError(StoreError, ValueError):
    """Bytes that are truncated, altered, or not what their name promises."""


class ReplicaIncompleteError(DamagedError):
    """An entry has been replicated, the files that it names have not."""


class UntrustedError(StoreError):
    """No trusted key signed what the version claims."""


class OutcomeUnknownError(StoreError):
    """Neither success nor failure of the commit could be established."""


class StorageError(StoreError, OSError):
    """The storage failed underneath."""

    def __str__(self) -> str:
        return MultiLoRAError.__str__(self)


class StorageDeniedError(StorageError, PermissionError):
    """Permission denied, read-only storage, or credentials missing or expired."""


class StorageFullError(StorageError):
    """No space left on the device, or a quota is used up."""


class StorageUnreachableError(StorageError, ConnectionError):
    """The endpoint, bucket or network cannot be reached."""


class AssemblyError(MultiLoRAError):
    """The model could not be assembled; the base is as it was."""


class BaseModelError(AssemblyError):
    """The base model cannot be built from what was given."""


class BaseMismatchError(AssemblyError):
    """The adapter was made for another base."""


class CoverageError(AssemblyError):
    """Keys missing, unexpected, or of another shape than the model's."""


class UnsupportedError(AssemblyError):
    """Refused before anything was touched: a kind that is not supported here."""


class DistributedError(MultiLoRAError):
    """Something went wrong between ranks."""


class DisagreementError(DistributedError):
    """Ranks were given different things; every rank raises this with the difference."""


class RankFailedError(DistributedError):
    """Another rank failed, so this one stopped as well."""


class ShardedModelError(DistributedError):
    """The call would break a model that is already sharded."""


class AuditError(DistributedError):
    """The audit of a model found faults."""


def choices(given: str, valid: Iterable[str], *, noun: str = "choice") -> str:
    """A remedy that names the nearest valid choices to `given` and lists them all (the first thirty)."""
    names = sorted(valid)
    if not names:
        return f"there is no {noun} to choose from"
    near = get_close_matches(given, names, n=3, cutoff=0.6)
    shown = ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}valid: {shown}"
