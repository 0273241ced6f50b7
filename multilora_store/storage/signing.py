"""Signing: who vouches for a version, by an ed25519 signature in the change that puts it.

What is signed is what the put claims: the adapter's name, the full content digest, metadata, parents, recipe,
base and step. Where the files lie and how they are spelled is not: a sync or a repair may move them, and the
digest binds the configuration and every tensor. Nor is the order of history: a signature says that a version is
genuine, not that it is the newest.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from multilora_store.errors import UntrustedError, UsageError
from multilora_store.storage.arguments import as_several, of_type
from multilora_store.storage.changes import Put, Signature
from multilora_store.storage.failures import translated
from multilora_store.storage.records import dump, sha256
from multilora_store.storage.state import Version

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["Signer", "TrustedKeys"]

_LARGEST_KEY: Final = 1 << 16
_ENVIRONMENT: Final = "env:"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs puts with a private key that is read when it is needed and kept nowhere.

    Attributes:
        source: A file (PEM or OpenSSH, not encrypted), or `env:NAME` of the variable that holds such a text.
    """

    source: str

    @classmethod
    def of(cls, source: str | os.PathLike[str] | None) -> Signer | None:
        """The signer for a configured key; None: nothing is signed.

        Raises:
            UsageError: `source` is neither a path nor `env:NAME`.
        """
        if source is None:
            return None
        return cls(_path(source, "signing_key"))

    def ready(self) -> Callable[[Put], Put]:
        """Reads the key; returns what signs a put with it. Equal claims and keys give equal signatures.

        Raises:
            UsageError: the key cannot be read, or is no ed25519 key.
        """
        key = _private_key(self.source)
        identity = _key_id(key.public_key())

        def sign(put: Put) -> Put:
            value = base64.b64encode(key.sign(_claims(put))).decode()
            return replace(put, signature=Signature(key=identity, value=value))

        return sign


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Public keys by their id. Whatever none of them signed is not trusted."""

    keys: Mapping[str, bytes]

    @classmethod
    def of(cls, files: Iterable[str | os.PathLike[str]] | TrustedKeys | None) -> TrustedKeys | None:
        """The keys in `files` (PEM or OpenSSH, one each); None: signatures are not looked at.

        Raises:
            UsageError: a file that cannot be read, is no ed25519 public key, or no file at all.
        """
        if files is None or isinstance(files, TrustedKeys):
            return files
        paths = as_several(files, "trusted_keys")
        if not paths:
            raise UsageError("trusted_keys is empty", remedy="name the files of public keys, or leave it out")
        found = [_public_key(_path(path, "a trusted key")) for path in paths]
        return cls({_key_id(key): key.public_bytes_raw() for key in found})

    def check(self, version: Version, where: str) -> None:
        """Passes if one of the keys signed what `version` claims.

        Raises:
            UntrustedError: it is unsigned, signed by another key, or not what was signed.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        signature = version.signature
        if signature is None:
            _refuse(version, where, "nobody signed it", key="")
        raw = self.keys.get(signature.key)
        if raw is None:
            _refuse(version, where, f"key {signature.key} signed it, trusted: {', '.join(self.keys)}", signature.key)
        try:
            value = base64.b64decode(signature.value, validate=True)
            Ed25519PublicKey.from_public_bytes(raw).verify(value, _claims(version.as_put()))
        except (binascii.Error, InvalidSignature):
            _refuse(version, where, f"its signature by key {signature.key} does not fit what it claims", signature.key)


def _refuse(version: Version, where: str, why: str, key: str) -> NoReturn:
    raise UntrustedError(
        f"{version} in {where} is not trusted",
        why=why,
        remedy="take it from a store where it is signed, or have the holder of a trusted key put it again",
        version=version.id,
        name=version.name,
        key=key,
    )


def _claims(put: Put) -> bytes:
    """What a signature covers, in one spelling."""
    return dump({
        "multilora_store": "put 1", "name": put.name, "sha256": put.sha256, "metadata": dict(put.metadata),
        "parents": list(put.parents), "recipe": put.recipe, "base": put.base, "step": put.step,
    })  # fmt: skip


def _key_id(key: Ed25519PublicKey) -> str:
    return sha256(key.public_bytes_raw())[:16]


def _private_key(source: str) -> Ed25519PrivateKey:
    keys, kinds = _cryptography()
    if source.startswith(_ENVIRONMENT):
        text = os.environ.get(source.removeprefix(_ENVIRONMENT), "").encode()
    else:
        text = _read(source)
    read = keys.load_ssh_private_key if b"OPENSSH PRIVATE KEY" in text else keys.load_pem_private_key
    key: Ed25519PrivateKey = _parsed(lambda: read(text, None), f"the signing key {source}", kinds.Ed25519PrivateKey)
    return key


def _public_key(path: str) -> Ed25519PublicKey:
    keys, kinds = _cryptography()
    text = _read(path)
    read = keys.load_ssh_public_key if text.startswith(b"ssh-") else keys.load_pem_public_key
    key: Ed25519PublicKey = _parsed(lambda: read(text), f"the trusted key {path}", kinds.Ed25519PublicKey)
    return key


def _path(given: str | os.PathLike[str], what: str) -> str:
    return given if isinstance(given, str) else os.fspath(of_type(given, os.PathLike, what, "the path of a file"))


def _read(path: str) -> bytes:
    file = Path(path).expanduser()
    with translated("reading a key", str(file)), open(file, "rb") as opened:
        return opened.read(_LARGEST_KEY)


def _parsed(read: Callable[[], Any], what: str, kind: type[T]) -> T:
    """The key, with nothing of its text in any error."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = read()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{what} cannot be read: {type(error).__name__}",
            remedy="give an ed25519 key as PEM or OpenSSH, without a passphrase (ssh-keygen -t ed25519 -N '')",
        ) from None
    if not isinstance(key, kind):
        raise UsageError(f"{what} is {type(key).__name__}, not {kind.__name__}", remedy="ssh-keygen -t ed25519")
    return key


def _cryptography() -> tuple[Any, Any]:
    """The package's readers and its ed25519 kinds; without it nothing is signed and nothing trusted."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UsageError(
            "signatures need the package cryptography", remedy="pip install cryptography (the extra signing)"
        ) from error
    return serialization, ed25519
