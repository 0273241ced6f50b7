"""Blobs on any fsspec file system, made anew in each process that uses it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from multilora_store.errors import StorageError, UsageError
from multilora_store.storage.blobs import BlobInfo, Blobs, Buffer, Exclusive, Sent, check_key, parts_of, redact
from multilora_store.storage.clouds import FSSPEC_PACKAGE, cloud_of, fsspec_options, refuse_secrets, server_of
from multilora_store.storage.failures import renewing, scrub, status_of, translate, translated

__all__ = ["FsspecBlobs"]

_TEMPORARY = ".tmp~"
_PRECONDITION_CODES = frozenset({"PreconditionFailed", "412"})


class FsspecBlobs:
    """Blobs below any fsspec URL.

    Keys are addressed exactly; no listing cache is used, nor whether a "folder" exists. A file system with
    an event loop does not survive a fork, so it is made when first needed in each process.
    """

    exclusive: Exclusive = "unknown"

    def __init__(self, url: str, **options: Any) -> None:
        self.url = redact(url).rstrip("/")
        refuse_secrets(url, options)
        self._server = server_of(url, options)
        self.endpoint = _endpoint(url, self._server)
        self._url = url
        self._options = fsspec_options(url, options)
        self._given = options
        self._lock = threading.Lock()
        self._made: tuple[int, Any, str] | None = None
        self._conditional = cloud_of(url) is not None  # whose `mode="create"` is one request; others look first
        if not self._conditional and type(self).exclusive == "unknown":
            self.exclusive = "absent"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._url, "options": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], **state["options"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @renewing
    def read(self, key: str) -> bytes | None:
        fs, path = self._at(key)
        with translated("reading", self._where(key)):
            try:
                return bytes(fs.cat_file(path))
            except (FileNotFoundError, NotADirectoryError):
                return None

    @renewing
    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        fs, path = self._at(key)
        with translated("reading", self._where(key)):
            try:
                return bytes(fs.cat_file(path, start=start, end=start + length))
            except (FileNotFoundError, NotADirectoryError):
                return None
            except Exception as error:
                if status_of(error) == 416:  # the range starts behind the end
                    return b""
                raise

    @renewing
    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        fs, path = self._at(key)
        with translated("writing", self._where(key)):
            self._make_parent(fs, path)
            fs.pipe_file(path, b"".join(parts_of(parts)))

    @renewing
    def create(self, key: str, data: bytes) -> bool:
        if not self._conditional:
            return self.stat(key) is None and self._create_whole(key, data)
        fs, path = self._at(key)
        try:
            fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            if _is_conflict(error):
                return False
            raise translate(error, "creating", self._where(key)) from error
        return True

    def _create_whole(self, key: str, data: bytes) -> bool:
        """Writes beside the key and renames, since such a file system may show a file that is half written."""
        fs, path = self._at(key)
        temporary = f"{path}{_TEMPORARY}{secrets.token_hex(4)}"
        with translated("creating", self._where(key)):
            self._make_parent(fs, path)
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)
        return True

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        if prefix:
            check_key(prefix.rstrip("/"))
        fs, base = self._fs()
        folder = prefix.rpartition("/")[0]
        with translated("listing", self._where(prefix)):
            fs.invalidate_cache()
            try:
                found = fs.find(f"{base}/{folder}" if folder else base, detail=True, withdirs=False)
            except (FileNotFoundError, NotADirectoryError):
                return
            stem = base.rstrip("/") + "/"
            for path, info in found.items():
                key = str(path).removeprefix(stem)
                ours = str(path).startswith(stem) and _TEMPORARY not in key
                if ours and key.startswith(prefix) and info.get("type") == "file":
                    yield BlobInfo(key, int(info["size"] or 0), _time_of(info))

    @renewing
    def delete(self, keys: Iterable[str]) -> None:
        fs, base = self._fs()
        for key in keys:
            with translated("deleting", self._where(key)):
                try:
                    fs.rm_file(f"{base}/{check_key(key)}")
                except (FileNotFoundError, NotADirectoryError):
                    continue

    @renewing
    def stat(self, key: str) -> BlobInfo | None:
        fs, path = self._at(key)
        with translated("looking at", self._where(key)):
            try:
                fs.invalidate_cache(path.rpartition("/")[0])
                info = fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if info.get("type") != "file":
            return None
        return BlobInfo(key, int(info["size"] or 0), _time_of(info))

    @renewing
    def copy_from(self, source: Blobs, from_: str, to: str) -> bool:
        if not self._conditional or not isinstance(source, FsspecBlobs):
            return False  # elsewhere a copy of fsspec's is a read and a write, and neither whole nor atomic
        if (source.endpoint, source._given) != (self.endpoint, self._given):
            return False
        fs, path = self._at(to)
        with translated("copying", self._where(to)):
            fs.cp_file(source._at(from_)[1], path)
        return True

    def local_path(self, key: str) -> Path | None:
        check_key(key)
        return None

    def renew(self) -> None:
        """Forgets the file system and its credentials; the next call makes them anew."""
        self._made = None

    def _at(self, key: str) -> tuple[Any, str]:
        fs, base = self._fs()
        return fs, f"{base}/{check_key(key)}"

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _fs(self) -> tuple[Any, str]:
        """The file system of this process and the root's path in it."""
        made = self._made
        if made is None or made[0] != os.getpid():
            if made is not None:
                self._lock = threading.Lock()  # the parent's may have been held at the fork
            with self._lock:
                made = self._made
                if made is None or made[0] != os.getpid():
                    made = self._made = (os.getpid(), *self._make())
        return made[1], made[2]

    def _make(self) -> tuple[Any, str]:
        import fsspec

        # An instance of our own: the cached one of another caller may carry a listing cache or be closed.
        try:
            options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
            if self._server and cloud_of(self._url) == "gs":
                # gcsfs's other class asks Google itself about the bucket, whatever server is given, and waits long.
                fs = import_module("gcsfs.core").GCSFileSystem(**options)
                base = fs._strip_protocol(self._url)
            else:
                fs, base = fsspec.core.url_to_fs(self._url, **options)
        except (ValueError, ImportError) as error:
            packages = ", ".join(f"{cloud}: {package}" for cloud, package in FSSPEC_PACKAGE.items())
            raise UsageError(
                f"no storage for {self.url}",
                why=scrub(str(error)),
                remedy=f"check the URL's scheme; install the package that serves it ({packages})",
            ) from error
        except Exception as error:
            raise translate(error, "opening", self.url) from error
        return fs, str(base).rstrip("/")

    def _make_parent(self, fs: Any, path: str) -> None:
        if not self._conditional:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def _endpoint(url: str, server: str | None) -> str:
    """The service behind `url`, without secrets: what one probe of exclusive creation holds for."""
    scheme, _, rest = redact(url).partition("://")
    # The same server may keep the conditions of one driver's protocol and not those of the other's.
    return f"fsspec+{cloud_of(url) or scheme}+{redact(server)}" if server else f"{scheme}://{rest.split('/', 1)[0]}"


def _is_conflict(error: BaseException) -> bool:
    """Whether a conditional write was refused because the key exists, however the driver says so."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if code in _PRECONDITION_CODES or isinstance(seen, FileExistsError):
            return True
        if code == "ConditionalRequestConflict":  # AWS's 409: two writers at once; the caller looks who won
            return True
        seen = seen.__cause__ or seen.__context__
    return status_of(error) in (409, 412)


def _time_of(info: dict[str, Any]) -> datetime:
    """The storage's own time of writing, from whatever field a file system keeps it in."""
    for field in ("LastModified", "last_modified", "mtime", "updated", "created", "modified"):
        value = info.get(field)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, (int, float)):
            value = datetime.fromtimestamp(value, UTC)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
    raise StorageError(
        f"{info.get('name')} has no time of writing",
        remedy="this file system cannot hold a store: it does not say when a file was written",
    )
