"""Signatures of versions: made where a key is named, carried along, and without a trusted one nothing is read."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from samples import CONFIG, same, tensors

from multilora_store.errors import DamagedError, UntrustedError, UsageError
from multilora_store.storage import Store, export_adapter, open_store, repair, restore_state, sync
from multilora_store.storage.changes import Put, Signature
from multilora_store.storage.contents import VersionRecord
from multilora_store.storage.records import sha256
from multilora_store.storage.signing import Signer, TrustedKeys
from multilora_store.storage.state import Version

Make = Callable[..., tuple[Path, Path]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a pair of keys: the files of the private and of the public one."""

    def make(name: str = "key", ssh: bool = False) -> tuple[Path, Path]:
        key = Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        form = keys.PrivateFormat.OpenSSH if ssh else keys.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(keys.Encoding.PEM, form, keys.NoEncryption()))
        spelled = (
            (keys.Encoding.OpenSSH, keys.PublicFormat.OpenSSH)
            if ssh
            else (keys.Encoding.PEM, keys.PublicFormat.SubjectPublicKeyInfo)
        )
        public.write_bytes(key.public_key().public_bytes(*spelled))
        return private, public

    return make


@pytest.mark.parametrize("ssh", [False, True])
def test_what_a_trusted_key_signed_is_read(ssh: bool, make: Make, tmp_path: Path) -> None:
    private, public = make(ssh=ssh)
    open_store(tmp_path / "store", signing_key=private).put("a", tensors(1), CONFIG, metadata={"loss": 0.5}, step=3)
    store = open_store(tmp_path / "store", trusted_keys=[public])
    assert same(store.get("a").tensors, tensors(1))
    assert store.path("a").is_dir()
    assert store.verify().ok
    assert pickle.loads(pickle.dumps(store)).verify("a").ok
    assert open_store(tmp_path / "store").get("a").version.signature is not None  # and who trusts no key reads it too


def test_ids_and_files_are_what_they_are_unsigned(make: Make, tmp_path: Path) -> None:
    private, _ = make()
    signed = open_store(tmp_path / "signed", signing_key=private).put("a", tensors(1), CONFIG)
    plain = open_store(tmp_path / "plain").put("a", tensors(1), CONFIG)
    assert (signed.id, signed.record, signed.nbytes) == (plain.id, plain.record, plain.nbytes)
    assert plain.signature is None
    written = json.loads((tmp_path / "plain/journal/00000001.json").read_bytes())
    assert "signature" not in written["changes"][0]


def _untrusted(store: Store, ref: str, words: str, target: Path) -> None:
    """Every way of reading is closed, and verify says why."""
    doors: list[Callable[[], Any]] = [
        lambda: store.get(ref), lambda: store.path(ref), lambda: export_adapter(store, ref, target / "out"),
        lambda: sync(store, target / "copy"), lambda: store.files.read_all(store.resolve(ref)),
    ]  # fmt: skip
    for door in doors:
        with pytest.raises(UntrustedError, match=words) as caught:
            door()
        assert caught.value.remedy
    assert not (target / "copy/journal").exists()
    [finding] = store.verify().findings
    assert (finding.kind, finding.subject) == ("signature", str(store.resolve(ref)))


def test_the_unsigned_and_the_strangers_are_not_read(make: Make, tmp_path: Path) -> None:
    private, public = make()
    stranger, _ = make("stranger")
    open_store(tmp_path / "store").put("a", tensors(1), CONFIG)
    trusting = open_store(tmp_path / "store", trusted_keys=[public])
    _untrusted(trusting, "a", "nobody signed it", tmp_path)
    open_store(tmp_path / "store", signing_key=stranger).put("a", tensors(1), CONFIG)
    _untrusted(trusting, "a", "trusted: ", tmp_path)
    copied = open_store(tmp_path / "store", signing_key=private).put("a", tensors(1), CONFIG)  # signed: put again
    assert trusting.get("a").version == copied
    assert len(list((tmp_path / "store/adapters/a").iterdir())) == 1, "the content was there"
    assert open_store(tmp_path / "store").verify(trusted_keys=[public]).ok
    assert trusting.verify().ok


CLAIMS: dict[str, Any] = {
    "name": "b", "sha256": "0" * 64, "metadata": {"loss": 0.1}, "parents": ("x@v0123456789abcdef",),
    "recipe": {"strategy": "ties"}, "base": {"name": "other"}, "step": 4,
}  # fmt: skip
PLACES: dict[str, Any] = {"directory": "adapters/b/v0-abcdef", "record": "1" * 64, "nbytes": 7}


def _put() -> Put:
    return Put(
        name="a", id="v" + "2" * 16, sha256="2" * 64, directory="adapters/a/v2-abcdef", record="3" * 64, nbytes=5,
        metadata={"loss": 0.5}, parents=("a@v1111111111111111",), recipe={"seed": 1}, base={"name": "tiny"}, step=3,
    )  # fmt: skip


def test_every_claim_is_signed_and_no_place_is(make: Make) -> None:
    private, public = make()
    trusted = TrustedKeys.of([public])
    assert trusted is not None
    put = Signer(str(private)).ready()(_put())
    assert {*CLAIMS, *PLACES, "id", "signature"} == {field.name for field in fields(Put)}, (
        "nobody decided about a field"
    )

    def version(put: Put) -> Version:
        return Version.from_put(put, 1, datetime(2026, 1, 1, tzinfo=UTC))

    trusted.check(version(put), "here")
    for field, value in PLACES.items():
        trusted.check(version(replace(put, **{field: value})), "here")
    for field, value in CLAIMS.items():
        with pytest.raises(UntrustedError, match="does not fit"):
            trusted.check(version(replace(put, **{field: value})), "here")
    signature = put.signature
    assert signature is not None
    for value in ("", "AAAA", signature.value[:-4], signature.value[4:] + signature.value[:4], "not base64!"):
        with pytest.raises(UntrustedError, match="does not fit"):
            trusted.check(version(replace(put, signature=Signature(key=signature.key, value=value))), "here")
    with pytest.raises(UntrustedError, match="trusted: "):
        trusted.check(version(replace(put, signature=Signature(key="0" * 16, value=signature.value))), "here")


def _forge(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the first entry; whoever can do that can also take the hint away."""
    path = root / "journal/00000001.json"
    entry = json.loads(path.read_bytes())
    change(entry["changes"][0])
    path.write_text(json.dumps(entry))
    (root / "head.json").unlink()


def test_other_files_behind_a_signed_digest_are_found(make: Make, tmp_path: Path) -> None:
    """A record that claims the signed digest for other tensors, named by the entry: only the digest gives it away."""
    private, public = make()
    root = tmp_path / "store"
    good = open_store(root, signing_key=private).put("a", tensors(1), CONFIG)
    evil = open_store(tmp_path / "evil").put("a", tensors(2), CONFIG)
    folder = root / good.directory
    for file in folder.iterdir():
        file.write_bytes((tmp_path / "evil" / evil.directory / file.name).read_bytes())
    record = VersionRecord.from_bytes((folder / "version.json").read_bytes(), "")
    forged = replace(record, digest=good.digest).to_bytes()
    (folder / "version.json").write_bytes(forged)
    _forge(root, lambda put: put.update(record=sha256(forged)))
    store = open_store(root, trusted_keys=[public])
    for door in (lambda: store.get("a").tensors, lambda: store.path("a"), lambda: export_adapter(store, "a", tmp_path)):
        with pytest.raises(DamagedError, match="do not have the digest"):
            door()
    for deep in (True, False):
        assert {finding.kind for finding in open_store(root).verify(deep=deep).findings} == {"config"}


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"key": 1, "value": "x"}, {"key": "k" * 99, "value": ""}])
def test_a_signature_of_any_shape_is_no_way_in(value: Any, make: Make, tmp_path: Path) -> None:
    private, public = make()
    open_store(tmp_path / "store", signing_key=private).put("a", tensors(1), CONFIG)
    _forge(tmp_path / "store", lambda put: put.update(signature=value))
    with pytest.raises((DamagedError, UntrustedError)):
        open_store(tmp_path / "store", trusted_keys=[public]).get("a")


def test_signatures_travel(make: Make, tmp_path: Path) -> None:
    """By sync, through a checkpoint, by restore and by repair."""
    private, public = make()
    source = open_store(tmp_path / "source", signing_key=private)
    for seed in range(70):  # more than one checkpoint
        source.put("a", tensors(seed % 3, layers=1), CONFIG, step=seed)
    sync(source, tmp_path / "copy")
    copy = open_store(tmp_path / "copy", trusted_keys=[public])
    assert copy.resolve("a").signature == source.resolve("a").signature
    assert open_store(tmp_path / "source", trusted_keys=[public]).verify().ok
    restore_state(copy, copy.state().seq)
    model = tmp_path / "copy" / copy.resolve("a").directory / "adapter_model.safetensors"
    model.write_bytes(b"")
    assert repair(copy, from_=source).ok
    assert copy.verify().ok
    open_store(tmp_path / "source").put("b", tensors(9), CONFIG)
    with pytest.raises(UntrustedError):  # the target, too, takes nothing in that it would not read
        sync(tmp_path / "source", copy)
    assert copy.names() == ["a"]


def test_the_same_put_with_the_same_key_makes_no_entry(make: Make, tmp_path: Path) -> None:
    private, _ = make()
    store = open_store(tmp_path / "store", signing_key=private)
    store.put("a", tensors(1), CONFIG)
    store.put("a", tensors(1), CONFIG)
    assert len(store.log()) == 1


def test_keys_that_are_none_are_refused_and_never_shown(make: Make, tmp_path: Path) -> None:
    private, public = make()
    other = generate_private_key(SECP256R1())
    wrong = tmp_path / "wrong.pem"
    wrong.write_bytes(other.private_bytes(keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption()))
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.BestAvailableEncryption(b"secret")
        )
    )
    junk = tmp_path / "junk.pem"
    junk.write_text("swordfish " * 10)
    for key in (wrong, locked, junk, public, "env:NO_SUCH_VARIABLE"):
        with pytest.raises(UsageError, match="ed25519") as caught:
            open_store(tmp_path / "store", signing_key=key).put("a", tensors(1), CONFIG)
        assert "swordfish" not in str(caught.value)
        assert caught.value.__cause__ is None
    for given in ([private], [junk], [], str(public), 3):
        with pytest.raises(UsageError):
            open_store(tmp_path / "store", trusted_keys=given)  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


def test_a_key_from_the_environment_is_kept_nowhere(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = make()
    text = private.read_text()
    monkeypatch.setenv("SIGNING", text)
    store = open_store(tmp_path / "store", signing_key="env:SIGNING")
    store.put("a", tensors(1), CONFIG)
    assert open_store(tmp_path / "store", trusted_keys=[public]).verify().ok
    secret = text.splitlines()[1].encode()
    assert secret not in pickle.dumps(store)
    assert secret.decode() not in repr(vars(store))
    assert not any(secret in path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())


def test_without_the_package_nothing_is_trusted(make: Make, tmp_path: Path) -> None:
    _, public = make()
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from multilora_store.storage import open_store\n"
        f"open_store({str(tmp_path)!r}, trusted_keys=[{str(public)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install cryptography" in done.stderr
