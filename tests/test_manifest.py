"""The manifest refuses to be wrong, and a lock is read back as it was written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multilora_store.errors import ConfigError, ManifestError, NameNotAllowedError, UsageError
from multilora_store.manifest import AdapterSpec, Lock, LockEntry, Manifest

CONFIG = {"r": 8, "target_modules": ["q_proj"]}


def test_entries_are_strings_mappings_or_specs() -> None:
    manifest = Manifest.from_mapping(
        {
            "a": "a@best",
            "b": {"trainable": True, "weight": 0.3},
            "c": AdapterSpec(name="x", source="/data/c"),
            "d": None,
        }
    )
    assert [spec.name for spec in manifest] == ["a", "b", "c", "d"]
    assert [spec.source for spec in manifest] == ["a@best", "b", "/data/c", "d"]
    assert manifest.adapters["b"].trainable
    assert manifest.adapters["b"].weight == 0.3


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "the manifest is empty"),
        ("a", "a manifest is a mapping from names to entries, found str 'a'"),
        (["a"], "a manifest is a mapping from names to entries, found list"),
        ({"a": 3}, "adapter 'a': a mapping of fields was expected, found int 3"),
        ({"a": {"trainabel": True}}, "unknown field 'trainabel'"),
        ({"a": {"trainable": "false"}}, "trainable must be true or false, found str 'false'"),
        ({"a": {"weight": True}}, "weight must be a number"),
        ({"a": {"weight": float("nan")}}, "weight nan is not finite"),
        ({"a": {"dtype": "bf16"}}, "unknown dtype 'bf16'"),
        ({"a": {"if_missing": "create"}}, "unknown if_missing 'create'"),
        ({"a": {"if_missing": "init"}}, "if_missing: init needs a config"),
        ({"a": {"config": "r=8"}}, "config must be a mapping or null"),
        ({"a": {"_target_": "os.system"}}, "unknown field '_target_'"),
        ({"a": None, "A": None}, "differ by case only"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(mapping: Any, message: str) -> None:
    """Cases 55, 59 and 96: no list-style entries, nothing instantiated, unknown fields refused."""
    with pytest.raises(ManifestError) as caught:
        Manifest.from_mapping(mapping)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_nearest_field_is_offered() -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_mapping({"a": {"trainabel": True}})
    assert "did you mean trainable?" in caught.value.remedy


@pytest.mark.parametrize("name", ["no", "../x", "1e5", "a b"])
def test_names_and_refs_are_checked(name: str) -> None:
    with pytest.raises(NameNotAllowedError):
        Manifest.from_mapping({name: None})
    with pytest.raises(UsageError):
        Manifest.from_mapping({"a": {"source": f"a@{name}"}})


def test_an_inline_config_is_checked_at_once() -> None:
    spec = AdapterSpec(name="a", if_missing="init", config=CONFIG)
    assert spec.adapter_config().r == 8
    with pytest.raises(ConfigError, match="r = 0"):
        AdapterSpec(name="a", config={**CONFIG, "r": 0})


def test_a_lock_is_read_back_as_it_was_written() -> None:
    entries = {
        "a": LockEntry(
            spec=AdapterSpec(name="a", source="a@best", weight=0.3), version="v" + "0" * 16, digest="0" * 64
        ),
        "b": LockEntry(spec=AdapterSpec(name="b", if_missing="init", config=CONFIG)),
        "c": LockEntry(spec=AdapterSpec(name="c", source="/data/c"), digest="1" * 64, store="s3://b/x"),
    }
    lock = Lock(entries=entries, snapshot="s1")
    assert Lock.from_json(lock.to_json()) == lock
    assert list(Lock.from_json(lock.to_json()).entries) == ["a", "b", "c"]
    assert [entry.fresh for entry in lock] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a lock"),
        ('{"lock": 2, "adapters": {"a": {}}}', "lock format 2"),
        ('{"lock": 1, "adapters": {}}', "names no adapters"),
        ('{"lock": 1, "adapters": {"a": {"source": "a"}}}', "'a' is not locked"),
        ('{"lock": 1, "adapters": {"a": {"locked": {"version": 3}}}}', "version must be a string or null"),
        ('{"lock": 1, "adapters": {"a": {"_target_": "os.system", "locked": {}}}}', "unknown field '_target_'"),
    ],
)
def test_a_wrong_lock_is_named(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Lock.from_json(text, where="set.lock")


def test_a_lock_is_plain_json() -> None:
    lock = Lock(entries={"a": LockEntry(spec=AdapterSpec(name="a"), version="v" + "0" * 16, digest="0" * 64)})
    assert json.loads(lock.to_json())["adapters"]["a"]["locked"]["version"] == "v" + "0" * 16


@pytest.mark.parametrize(
    ("altered", "message"),
    [
        ({"digset": "x"}, "locked holds digset"),
        ({"digest": None}, "locked without a digest"),
        ({"digest": None, "version": None}, "locked without a digest"),
    ],
)
def test_a_lock_that_lost_its_digest_makes_no_fresh_adapter(altered: dict[str, Any], message: str) -> None:
    spec = AdapterSpec(name="a", source="a@latest", config=CONFIG)
    text = Lock(entries={"a": LockEntry(spec=spec, version="v" + "0" * 16, digest="0" * 64, store="/s")}).to_json()
    document = json.loads(text)
    document["adapters"]["a"]["locked"] |= altered
    with pytest.raises(ManifestError, match=message):
        Lock.from_json(json.dumps(document))
