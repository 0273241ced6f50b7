"""Blobs on S3, Google Cloud Storage and Azure through obstore: conditional creates, and speed."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from multilora_store.errors import StorageUnreachableError, UsageError
from multilora_store.storage.blobs import (
    BlobInfo,
    Blobs,
    Buffer,
    Exclusive,
    Sent,
    check_key,
    parts_of,
    pieces_of,
    redact,
)
from multilora_store.storage.clouds import FSSPEC_PACKAGE, cloud_of, obstore_settings, refuse_secrets, server_of
from multilora_store.storage.failures import renewing, scrub, translate, translated
from multilora_store.storage.fsspec_blobs import FsspecBlobs

__all__ = ["OBJECT_SCHEMES", "ObjectBlobs", "obstore_installed"]

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "abfs", "abfss"})
_OPTIONS = frozenset({"endpoint_url", "region", "anon", "retries", "timeout", "config", "client_options"})
_CHUNK = 16 << 20
_CONFLICT = re.compile(r"ConditionalRequestConflict|\b409 Conflict", re.IGNORECASE)
_BEHIND_THE_END = re.compile(r"InvalidRange|\b416 |range started at", re.IGNORECASE)


def obstore_installed() -> bool:
    """Whether the obstore package is there, without importing it."""
    return importlib.util.find_spec("obstore") is not None


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _after_a_fork(method: _Method) -> _Method:
    """Lets fsspec answer in a forked process, where obstore's threads are gone."""

    @wraps(method)
    def call(self: ObjectBlobs, *args: Any) -> Any:
        other = self._in_a_fork()
        return method(self, *args) if other is None else getattr(other, method.__name__)(*args)

    return cast("_Method", call)


class ObjectBlobs:
    """Blobs in a bucket of a cloud's object storage.

    Args:
        url: `s3://bucket/prefix`, `gs://...` or `az://...`.
        endpoint_url: Another server that speaks the protocol; by default the environment's, or the cloud itself.
        region: The bucket's region, on S3; by default AWS_REGION or the endpoint's.
        anon: Sends unsigned requests.
        retries: How often one request is repeated after a server's failure or a lost connection.
        timeout: Seconds that one request may take.
        config: Further settings of obstore's store, as they are.
        client_options: Further settings of obstore's HTTP client, as they are.

    Secrets come from the environment or the cloud's own chain, never from options.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        anon: bool = False,
        retries: int = 5,
        timeout: float = 60.0,
        config: dict[str, Any] | None = None,
        client_options: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise UsageError(
                f"unknown storage options for {redact(url)}: {', '.join(sorted(unknown))}",
                remedy=f"valid: {', '.join(sorted(_OPTIONS))}, driver; or driver=fsspec for the options of fsspec",
            )
        self.url = redact(url).rstrip("/")
        self._arguments: dict[str, Any] = {
            "url": url.rstrip("/"), "endpoint_url": endpoint_url, "region": region, "anon": anon,
            "retries": retries, "timeout": timeout, "config": config, "client_options": client_options,
        }  # fmt: skip
        refuse_secrets(url, self._arguments)
        self._scheme, self._cloud = url.split("://", 1)[0], cloud_of(url) or "s3"
        self._server = server_of(url, self._arguments)
        self.endpoint = f"obstore+{self._cloud}+{redact(self._server)}" if self._server else f"{self._cloud}://cloud"
        self.exclusive: Exclusive = "unknown" if self._server else "holds"
        self._lock = threading.Lock()
        self._made: tuple[int, Any] | None = None
        self._whole: tuple[int, Any] | None = None
        self._other: tuple[int, FsspecBlobs] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"ObjectBlobs({self.url!r})"

    @_after_a_fork
    @renewing
    def read(self, key: str) -> bytes | None:
        import obstore

        with translated("reading", self._where(key)):
            try:
                return bytes(obstore.get(self._store(), check_key(key)).bytes())
            except FileNotFoundError:
                return None

    @_after_a_fork
    @renewing
    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        import obstore

        if length <= 0:
            return b""
        with translated("reading", self._where(key)):
            try:
                return bytes(obstore.get_range(self._store(), check_key(key), start=start, length=length))
            except FileNotFoundError:
                return None
            except Exception as error:
                if _BEHIND_THE_END.search(str(error)):
                    return b""
                raise

    @_after_a_fork
    @renewing
    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        import obstore

        large = sum(part.nbytes for part in parts_of(parts)) > 4 * _CHUNK
        body: Any = pieces_of(parts, sent) if large else b"".join(parts_of(parts))
        with translated("writing", self._where(key)):
            obstore.put(self._store(), check_key(key), body, chunk_size=_CHUNK, use_multipart=large)

    @_after_a_fork
    @renewing
    def create(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        path, store = check_key(key), self._store()
        try:
            obstore.put(store, path, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError, FileExistsError):
            return False
        except Exception as error:
            if _CONFLICT.search(str(error)):
                return False  # AWS: two writers at once; the caller looks who won
            raise translate(error, "creating", self._where(key)) from error
        return True

    @_after_a_fork
    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        import obstore

        if prefix:
            check_key(prefix.rstrip("/"))
        folder = prefix.rpartition("/")[0]
        with translated("listing", self._where(prefix)):
            for page in obstore.list(self._store(), prefix=folder or None, chunk_size=1000):
                for found in page:
                    if found["path"].startswith(prefix):
                        yield BlobInfo(found["path"], found["size"], found["last_modified"])

    @_after_a_fork
    @renewing
    def delete(self, keys: Iterable[str]) -> None:
        import obstore

        paths = [check_key(key) for key in keys]
        for start in range(0, len(paths), 1000):
            batch = paths[start : start + 1000]
            with translated("deleting", self._where(batch[0])):
                try:
                    obstore.delete(self._store(), batch)
                except FileNotFoundError:
                    self._delete_one_by_one(batch)

    def _delete_one_by_one(self, paths: Sequence[str]) -> None:
        import obstore

        for path in paths:
            try:
                obstore.delete(self._store(), path)
            except FileNotFoundError:
                continue

    @_after_a_fork
    @renewing
    def stat(self, key: str) -> BlobInfo | None:
        import obstore

        with translated("looking at", self._where(key)):
            try:
                meta = obstore.head(self._store(), check_key(key))
            except FileNotFoundError:
                return None
        return BlobInfo(key, meta["size"], meta["last_modified"])

    @renewing
    def copy_from(self, source: Blobs, from_: str, to: str) -> bool:
        import obstore

        if not isinstance(source, ObjectBlobs) or _service(self._arguments) != _service(source._arguments):
            return False
        (bucket, prefix), (other, stem) = (_bucket_and_prefix(blobs._arguments["url"]) for blobs in (self, source))
        if bucket != other or _runtime_of not in (None, os.getpid()):  # obstore copies inside one bucket
            ours, theirs = self._through_fsspec(), source._through_fsspec()
            return ours is not None and theirs is not None and ours.copy_from(theirs, from_, to)
        with translated("copying", self._where(to)):
            obstore.copy(self._bucket_store(bucket), f"{stem}{check_key(from_)}", f"{prefix}{check_key(to)}")
        return True

    def local_path(self, key: str) -> Path | None:
        check_key(key)
        return None

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _store(self) -> Any:
        """obstore's store of this process."""
        made = self._made
        if made is None or made[0] != os.getpid():
            with self._lock:
                made = self._made = (os.getpid(), self._make())
        return made[1]

    def renew(self) -> None:
        """Forgets the connection and its credentials; the next call makes them anew."""
        self._made = self._whole = None

    def _in_a_fork(self) -> FsspecBlobs | None:
        """The same blobs through fsspec, if this process was forked from one that used obstore."""
        if _runtime_of in (None, os.getpid()):
            return None
        package = FSSPEC_PACKAGE[self._cloud]
        if importlib.util.find_spec(package) is None:
            raise StorageUnreachableError(
                f"{self.url} cannot be used in this forked process",
                why="obstore was in use before the fork, and its threads do not survive one",
                remedy=f"start workers with spawn, or install {package} for use in them",
            )
        return self._through_fsspec()

    def _through_fsspec(self) -> FsspecBlobs | None:
        """The same blobs through fsspec, where its package is installed."""
        if importlib.util.find_spec(FSSPEC_PACKAGE[self._cloud]) is None:
            return None
        if self._other is None or self._other[0] != os.getpid():
            given = {name: self._arguments[name] for name in ("region", "anon", "retries", "timeout")}
            given["endpoint_url"] = self._server
            self._other = (os.getpid(), FsspecBlobs(self._arguments["url"], **given))
        return self._other[1]

    def _bucket_store(self, bucket: str) -> Any:
        """obstore's store of the whole bucket, in this process."""
        made = self._whole
        if made is None or made[0] != os.getpid():
            made = self._whole = (os.getpid(), self._make(f"{self._scheme}://{bucket}"))
        return made[1]

    def _make(self, url: str | None = None) -> Any:
        from obstore.store import from_url

        global _runtime_of
        given = self._arguments
        config, client = obstore_settings(url or given["url"], given, self._server)
        client = {"timeout": timedelta(seconds=given["timeout"]), **client}
        retry = {"max_retries": given["retries"], "retry_timeout": timedelta(seconds=3 * given["timeout"])}
        provider = None if given["anon"] or self._cloud != "s3" else _aws_chain()
        extra = {"credential_provider": provider} if provider else {}
        try:
            made = from_url(url or given["url"], config=config, client_options=client, retry_config=retry, **extra)
        except Exception as error:
            raise UsageError(
                f"no storage for {self.url}",
                why=scrub(str(error)).partition(" Debug source:")[0],
                remedy="check the URL, the options, and what the environment says of the account",
            ) from error
        _runtime_of = os.getpid()
        return made


_runtime_of: int | None = None


def _service(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal for two roots to be at one service, under one account."""
    scheme = arguments["url"].partition("://")[0].removesuffix("a" if arguments["url"].startswith("s3a") else "")
    return scheme, *(arguments[name] for name in ("endpoint_url", "region", "anon", "config", "client_options"))


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    """The bucket, and what goes before every key in it."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    return bucket, f"{prefix}/" if prefix else ""


def _aws_chain() -> Any:
    """A provider over botocore's chain (profiles, SSO), where the environment holds no keys of its own."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or importlib.util.find_spec("botocore") is None:
        return None
    from botocore.session import get_session  # type: ignore[import-untyped]

    credentials = get_session().get_credentials()
    if credentials is None or credentials.method in ("iam-role", "container-role", "assume-role-with-web-identity"):
        return None  # obstore knows these by itself

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    return provide
