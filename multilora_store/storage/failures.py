"""Failures: what storages raise, translated into the typed tree with a remedy, free of secrets."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from multilora_store.errors import (
    MultiLoRAError,
    StorageDeniedError,
    StorageError,
    StorageFullError,
    StorageUnreachableError,
)

__all__ = ["renewing", "scrub", "status_of", "translate", "translated"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_EXPIRED = re.compile(r"(?i)expired ?token|token .{0,40}expired|RequestExpired|credentials .{0,40}expired")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_SECRETS = re.compile(
    r"(?i)((?:secret|password|passwd|token|signature|credential|access_?key(?:_?id)?|account_?key|session|sig|authorization)"
    r"[\w-]*[\"']?\s*[=:]\s*[\"']?(?:bearer\s+|basic\s+)?)[^\s\"'&,;)}<]+"
)
_USERINFO = re.compile(r"://[^/\s@]+@")
_DENIED_WORDS = re.compile(
    r"(?i)access ?denied|permission|forbidden|unauthori[sz]ed|expiredtoken|invalidaccesskeyid|"
    r"signaturedoesnotmatch|nocredentials|unable to locate credentials|\b40[13]\b|missing credentials|"
    r"credentialsnotloaded"
)
_FULL_WORDS = re.compile(r"(?i)no space left|quota|entitytoolarge|insufficient storage|\b507\b")
_UNREACHABLE_WORDS = re.compile(
    r"(?i)connect|timed? ?out|unreachable|nosuchbucket|containernotfound|(?:bucket|container) does not exist|"
    r"name or service|dns|slowdown|\b50[0234]\b|reset by peer|temporary failure|broken pipe|permanentredirect|region"
)


def scrub(text: str) -> str:
    """`text` with whatever looks like a secret replaced, one line, at most 400 characters."""
    one_line = " ".join(_USERINFO.sub("://***@", text).split())
    return _SECRETS.sub(r"\1***", one_line)[:400]


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind `error`, where a driver left one (botocore, aiohttp, azure, gcsfs), else None."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        own = (getattr(seen, name, None) for name in ("status", "status_code", "code"))
        for status in (*own, getattr(response, "status_code", None)):
            if isinstance(status, int) and 100 <= status < 600:
                return status
        seen = seen.__cause__ or seen.__context__
    return None


def translate(error: BaseException, doing: str, where: str) -> StorageError:
    """The typed error for `error`, raised while `doing` something at `where` (both free of secrets)."""
    status, code = status_of(error), getattr(error, "errno", None)
    found = scrub(f"{type(error).__name__}: {error}")
    told = found.partition(" Debug source:")[0]  # obstore repeats it all as a dump of its own structures
    what = f"{doing} failed at {where}"
    facts = {"where": where, "doing": doing, "status": status}
    if code in _FULL or _FULL_WORDS.search(found):
        return StorageFullError(what, why=told, remedy="free space or raise the quota, then repeat", **facts)
    if code in _DENIED or status in (401, 403) or (status is None and _DENIED_WORDS.search(found)):
        remedy = "check the credentials and the rights to read, write and list there"
        if status == 403:
            remedy += "; AWS also answers 403 for a missing key when the right to list the bucket is missing"
        elif code in _DENIED:
            remedy = "check the owner and mode of the folder, and whether the file system is mounted read-only"
        return StorageDeniedError(what, why=told, remedy=remedy, **facts)
    if isinstance(error, (ConnectionError, TimeoutError)) or _UNREACHABLE_WORDS.search(found):
        remedy = "check the endpoint, the region, that the bucket exists, and the network; then repeat"
        return StorageUnreachableError(what, why=told, remedy=remedy, **facts)
    return StorageError(what, why=told, remedy="see the cause above; the store itself is as it was", **facts)


def renewing(method: _Method) -> _Method:
    """Repeats a call once, over a new connection, when credentials expired in the middle of a run.

    For methods of a class that has a `renew` method.
    """

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except StorageDeniedError as error:
            if not _EXPIRED.search(error.why):
                raise
            self.renew()
            return method(self, *args)

    return cast("_Method", call)


@contextmanager
def translated(doing: str, where: str) -> Iterator[None]:
    """Lets typed errors pass and turns everything else a storage raises into one."""
    try:
        yield
    except MultiLoRAError:
        raise
    except Exception as error:  # a driver may raise anything at all
        raise translate(error, doing, where) from error
