"""Trusted keys at the door: no command reads or writes out what none of them signed, and none leaves a part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from multilora_store import open_store

Run = Callable[[str], Any]


@pytest.fixture
def signed(store: str, here: Path) -> str:
    """Words that name a store where `a` is signed and `b` is not, and the key that is trusted."""
    key = Ed25519PrivateKey.generate()
    (here / "key.pem").write_bytes(key.private_bytes(keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption()))
    (here / "key.pub").write_bytes(
        key.public_key().public_bytes(keys.Encoding.PEM, keys.PublicFormat.SubjectPublicKeyInfo)
    )
    signing = open_store(store, signing_key=here / "key.pem")
    stored = signing.get("a")
    signing.put("a", stored.tensors, stored.config)
    return f"store={store} store.trusted_keys=[key.pub]"


@pytest.mark.parametrize(
    "line",
    [
        "assemble '+adapters=[a,b]' base=demo",
        "merge '+adapters=[a,b]' merge=linear merge.into=ab",
        "export b ./out",
        "export '*' ./out",
        "path b",
        "diff a b",
        "sync target=./out include=[b]",
    ],
)
def test_what_nobody_signed_is_refused(line: str, run: Run, signed: str, store: str, here: Path) -> None:
    before = open_store(store).log()
    result = run(f"{line} {signed.replace('store=', 'source=', 1) if line.startswith('sync') else signed}")
    assert result.code == 1, result.out
    assert "nobody signed" in result.err
    assert "b@" in result.err
    assert open_store(store).log() == before
    assert not list(here.glob("out/b/*"))


def test_what_is_signed_is_assembled(run: Run, signed: str) -> None:
    assert run(f"assemble '+adapters=[a]' base=demo {signed}").code == 0
    assert run(f"export a ./out {signed}").code == 0


def test_a_snapshot_is_restored_whole_or_not_at_all(run: Run, signed: str, store: str, here: Path) -> None:
    line = f"assemble '+adapters=[a,b]' adapters.a.trainable=true base=demo save=true store={store}"
    assert run(f"{line} store.signing_key=key.pem").code == 0
    before = sorted(here.iterdir())
    result = run(f"restore ./out {signed}")
    assert (result.code, "nobody signed" in result.err) == (1, True)
    assert sorted(here.iterdir()) == before, "neither a folder nor a part of one"
    assert run(f"restore ./out store={store}").code == 0
    umask = os.umask(0)
    os.umask(umask)
    assert (here / "out").stat().st_mode & 0o777 == 0o777 & ~umask


def test_trust_holds_for_every_store_that_a_set_names(run: Run, signed: str, store: str) -> None:
    """An unsigned adapter does not come in by another store, nor by a folder that a sync takes for one."""
    line = f"assemble '+adapters=[a]' +adapters.other.source=b base=demo {signed}"
    result = run(f"{line} +adapters.other.store=file://{store}")
    assert (result.code, "nobody signed" in result.err) == (1, True), result.err
    assert run(f"export b ./plain store={store}").code == 0
    locked = f"assemble '+adapters=[a]' +adapters.b.source=./plain base=demo store={store} lock=set.json"
    assert run(locked).code == 0
    for words in (
        f"assemble '+adapters=[a]' +adapters.plain.source=./plain base=demo {signed}",
        f"plan '+adapters=[a]' +adapters.plain.source=./plain base=demo world_size=2 {signed}",
        f"doctor '+adapters=[a]' +adapters.plain.source=./plain base=demo {signed}",
        f"assemble lock_from=set.json base=demo {signed}",
    ):
        result = run(words)
        code = 3 if words.startswith("doctor") else 1
        assert (result.code, "nobody signed it" in result.err + result.out) == (code, True), (words, result.err)
    for command in ("assemble", "plan world_size=2", "doctor"):
        keys = "base=demo store.trusted_keys=[key.pub]"
        result = run(f"{command} +adapters.other.source=b +adapters.other.store={store} {keys}")
        assert (result.code, "and no store" in result.err) == (2, True), (command, result.err)
    result = run(f"assemble '+adapters=[a,b]' base=demo store=demo {keys}")
    assert (result.code, "nobody signed it" in result.err) == (1, True), result.err
    result = run("sync source=./plain target=./copy store.trusted_keys=[key.pub]")
    assert (result.code, "plain adapters" in result.err) == (1, True), result.err


def test_each_end_of_a_sync_is_told_its_own_options(run: Run, store: str) -> None:
    """Options reach the storage, which refuses one it does not know; a local end takes none of `store.options`."""
    for word in ("target_options.nope=1", "store.options.nope=1"):
        result = run(f"sync source={store} target=s3://bucket/run7 {word}")
        assert (result.code, "nope" in result.err) == (2, True), result.err
    result = run(f"sync source={store} target=./copy source_options.nope=1")
    assert (result.code, "takes no storage options" in result.err) == (2, True), result.err
    assert run(f"sync source={store} target=./copy store.options.nope=1").code == 0
    for cloud in ("s3", "gcs", "azure"):
        assert run(f"sync source={store} target=./{cloud} store={cloud}").code == 0
    result = run(f"repair store={store} source=s3://bucket/run7 source_options.nope=1")
    assert (result.code, "nope" in result.err) == (2, True), result.err
