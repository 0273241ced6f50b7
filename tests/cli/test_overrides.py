"""Every row of what Hydra does with a typed line: what works, what the door makes work, what gets a one-line answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from multilora_store.cli.overrides import prepare, quoted

Run = Callable[[str], Any]


def composed(run: Run, line: str) -> Any:
    result = run(f"assemble --cfg job {line}")
    assert result.code == 0, result.err
    return yaml.safe_load(result.out)


def refused(run: Run, line: str) -> str:
    result = run(line)
    assert result.code == 2, result.out + result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 4
    assert max(map(len, result.err.splitlines())) < 600
    return result.err


@pytest.mark.parametrize("line", ["'+adapters=[a,b]'", "'adapters=[a,b]'", "+adapters=a"])
def test_adapters_are_chosen_with_and_without_plus_and_singly(run: Run, line: str) -> None:
    """Case 55: several options of one group all count."""
    assert list(composed(run, line)["adapters"]) == (["a"] if line == "+adapters=a" else ["a", "b"])


def test_the_order_of_choice_is_the_order_of_the_set(run: Run) -> None:
    assert list(composed(run, "'+adapters=[c,a,b]'")["adapters"]) == ["c", "a", "b"]


def test_a_store_s_adapter_needs_no_file(run: Run, store: str) -> None:
    adapters = composed(run, f"'+adapters=[x,y1@best,team/zh,z@2026-11-30T12:00:00Z,\"team/*\"]' store={store}")[
        "adapters"
    ]
    assert {name: entry["source"] for name, entry in adapters.items()} == {
        "x": "x",
        "y1": "y1@best",
        "team/zh": "team/zh",
        "z": "z@2026-11-30T12:00:00Z",
        "team/*": "team/*",
    }


def test_one_field_of_one_adapter_is_overridden(run: Run) -> None:
    """Case 125: adapters.a.weight=.3 changes only a."""
    adapters = composed(run, "'+adapters=[a,b]' adapters.a.weight=.3 adapters.b.source=b@best")["adapters"]
    assert (adapters["a"]["weight"], adapters["b"]["weight"]) == (0.3, 1.0)
    assert (adapters["a"]["source"], adapters["b"]["source"]) == ("a@latest", "b@best")


@pytest.mark.parametrize(
    "line",
    [
        "'+adapters={x: {source: \"s3://b/c\", trainable: true}}'",
        "+adapters.x.source=s3://b/c +adapters.x.trainable=true",
        "'+adapters.x={source: \"s3://b/c\", trainable: true}'",
    ],
)
def test_inline_entries_in_every_spelling(run: Run, line: str) -> None:
    entry = composed(run, line)["adapters"]["x"]
    assert (entry["source"], entry["trainable"], entry["weight"]) == ("s3://b/c", True, 1.0)


def test_a_source_with_odd_characters_is_quoted_by_the_door(run: Run) -> None:
    adapters = composed(run, "'+adapters.x.source=s3://b/c?versionId=1#x' '+adapters.z1.source=./数据/a b;c'")[
        "adapters"
    ]
    assert adapters["x"]["source"] == "s3://b/c?versionId=1#x"
    assert adapters["z1"]["source"] == "./数据/a b;c"


def test_names_with_slashes_and_dots_take_overrides(run: Run) -> None:
    adapters = composed(run, "'+adapters=[team/a,v1.5]' adapters.team/a.weight=0.3 adapters.v1.5.trainable=true")[
        "adapters"
    ]
    assert adapters["team/a"]["weight"] == 0.3
    assert adapters["v1.5"]["trainable"] is True
    assert list(adapters) == ["team/a", "v1.5"]


def test_an_override_never_brings_an_adapter_in(run: Run) -> None:
    for line in ("adapters.team/q.weight=1", "adapters.q.weight=1", "adapters.q.config.r=4"):
        assert "is not in the set" in refused(run, f"assemble '+adapters=[a,b]' {line}")


@pytest.mark.parametrize("line", ["adapters.x.config.r=8", "'adapters.x.config={r: 8}'"])
def test_config_fields_are_added_to_an_entry_without_config(run: Run, store: str, line: str) -> None:
    assert composed(run, f"'+adapters=[x]' store={store} {line}")["adapters"]["x"]["config"] == {"r": 8}


def test_one_config_field_of_a_file_is_changed_alone(run: Run) -> None:
    config = composed(run, "'+adapters=[a]' adapters.a.config.r=2")["adapters"]["a"]["config"]
    assert config == {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("name", ["1", "true", "null", "1e5", "1.5", "[a]"])
def test_names_that_hydra_reads_as_something_else_are_refused(run: Run, name: str) -> None:
    assert "is not allowed" in refused(run, f"assemble '+adapters=[{name}]'")


@pytest.mark.parametrize("name", ["'1'", "no", "on", "y", "0x1f", "latest", "2026-11-30", "a--b", "a.", "con", "../x"])
def test_names_that_yaml_or_a_disk_would_misread_are_refused(run: Run, name: str) -> None:
    assert "is not allowed" in refused(run, f'assemble "+adapters=[{name}]"')


def test_a_name_chosen_twice_is_refused(run: Run) -> None:
    assert "name it once" in refused(run, "assemble '+adapters=[a,a]'")
    words = refused(run, "assemble '+adapters=[a@v1234,a@v5678]'")
    assert "'+adapters={a1: {source: a@v1234}, a2: {source: a@v5678}}'" in words


def test_the_remedy_for_two_versions_of_one_name_works(run: Run) -> None:
    adapters = composed(run, "'+adapters={a1: {source: a@v1234}, a2: {source: a@v5678}}'")["adapters"]
    assert [entry["source"] for entry in adapters.values()] == ["a@v1234", "a@v5678"]


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("'+adapters=[a b]'", "+adapters=[a,b]"),
        ("+adapters=a,b", "+adapters=[a,b]"),
        ("'+adapters=[a;b]'", "quote"),
        ("'+adapters=a b'", "+adapters=[a,b]"),
    ],
)
def test_only_the_documented_separator_passes(run: Run, line: str, remedy: str) -> None:
    """Case 96: a list is [a,b]; other separators are refused with the right spelling."""
    assert remedy in refused(run, f"assemble {line}")


def test_a_path_is_not_a_name(run: Run) -> None:
    assert "source" in refused(run, "assemble '+adapters=[/data/a]'")


def test_a_date_in_braces_is_explained(run: Run) -> None:
    assert "a@2026-11-30" in refused(run, "assemble '+adapters=[a@{2026-11-30}]'")


@pytest.mark.parametrize(
    "value", ["/x/~y", "/x;y", "/x#y", "/x!y", "/x<y", "/x(y", "/x=y", "/数据", "123", "a'b", "~/s"]
)
def test_known_strings_are_quoted_for_hydra(run: Run, value: str) -> None:
    import shlex

    config = composed(run, f"+adapters=a base=demo {shlex.quote('store.url=' + value)}")
    assert config["store"]["url"] == value


def test_an_unknown_key_with_odd_characters_says_to_quote(run: Run) -> None:
    assert "quote values" in refused(run, "assemble 'plugins.strict=a;b'")


@pytest.mark.parametrize("text", ["a'b", "a\\'b", "", "a\\\\'", "a\\b"])
def test_quoting_survives_hydra_s_grammar(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"x={quoted(text)}").value() == text


def test_a_field_that_is_no_field_lists_the_fields(run: Run) -> None:
    assert "did you mean weight" in refused(run, "assemble '+adapters=[a]' adapters.a.wieght=1")


def test_an_unknown_option_names_the_nearest(run: Run) -> None:
    assert "did you mean store.url" in refused(run, "assemble +adapters=a stor.url=/x")


def test_a_wrong_type_is_named(run: Run) -> None:
    assert "heavy" in refused(run, "assemble '+adapters=[a]' adapters.a.weight=heavy")
    assert "seed" in refused(run, "assemble '+adapters=[a]' seed=lucky")


def test_a_string_where_a_mapping_belongs(run: Run) -> None:
    refused(run, "assemble '+adapters={x: s3}'")


def test_nothing_in_a_manifest_is_instantiated(run: Run, here: Path) -> None:
    """Case 59: _target_ in a manifest is refused, and nothing runs."""
    for line in (
        "assemble '+adapters={x: {_target_: os.mkdir, path: hacked}}'",
        "assemble '+adapters={x: {source: a, config: {_target_: os.mkdir, path: hacked}}}' base=demo",
    ):
        assert "_target_" in refused(run, line)
    assert list(here.iterdir()) == []


def test_plus_on_a_group_that_has_a_default_says_so(run: Run, store: str) -> None:
    refused(run, f"merge '+adapters=[a,b]' +merge=ties merge.into=ab store={store}")


def test_the_empty_manifest(run: Run, store: str) -> None:
    told = refused(run, "assemble")
    assert "no adapters are chosen" in told
    assert "there are a, b, c" in told
    assert "'+adapters=[a,b]'" in told
    there = refused(run, f"assemble base=demo store={store}")
    assert "there are a, b, team/zh" in there
    assert "has any" in refused(run, f"assemble base=demo store.url={store}-not-there")
    refused(run, f"assemble '+adapters=[a]' snapshot=latest base=demo store={store}")


def test_prepare_leaves_what_needs_no_help() -> None:
    words = ["+adapters=[a,b]", "store.url=/x", "output=json", "~store"]
    assert prepare(words, text_keys={"store.url"}, multirun=False) == words


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("list +foo=1", "list has no option foo"),
        ("list +store.uri=/x", "list has no option store.uri"),
        ("assemble '+adapters=[a]' +shard.backends=fsdp2 base=demo", "no option shard.backends"),
        ("list store=my-store", "for a store of that name: store.url=my-store"),
        ("merge '+adapters=[a,b]' merge=tie merge.into=x", "did you mean ties"),
        ("assemble '+adapters=[a]' shard=fsdp3", "shard=fsdp3 is no choice"),
        ("assemble '+adapters=[a]' assembler=fuse_set", "add plugins=[fuse_set]"),
        ("import ./x reader=bare", "add plugins=[bare_file]"),
        ("assemble '+adapters=[a]' steps.after_load=round_to_int8", "add plugins=[cast_adapters]"),
        ("assemble '+adapters=[a]' steps=load", "steps.after_load=NAME"),
        ("gc policies=[3]", "policies=3 is no choice"),
        ("import kohya://x reader=kohya store=./s", "both say what reads the source"),
        ("doctor checks=[x] store=./s", "checks=x is no choice"),
        ("plan '+adapters=[a]'", "world_size: how many ranks"),
        ("assemble '+adapters=[a]' base=hf", "add base.path=..."),
        ("list output=xml", "expected one of [table, json]"),
        ("assemble '+adapters={x: 3}'", "an adapter is a mapping of fields"),
        ("assemble '+adapters=[a]' base=demo store=demo device=gpu9", "unknown device 'gpu9'"),
        (
            "assemble '+adapters=[a]' base=demo store=demo lock=nowhere/set.json",
            "lock=nowhere/set.json cannot be written",
        ),
    ],
)
def test_what_nothing_reads_or_nobody_can_do_is_a_usage_error(run: Run, line: str, told: str) -> None:
    result = run(line)
    assert result.code == 2, result
    assert told in result.err
