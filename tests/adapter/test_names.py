"""Names and references: what is allowed, and that every spelling can be turned back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from multilora_store.adapter import (
    Ref,
    canonical_tensor_name,
    check_name,
    check_new_name,
    check_tag,
    module_name,
    name_from_module,
    name_from_storage,
    source_kind,
    storage_name,
)
from multilora_store.errors import NameNotAllowedError

GOOD = ["a", "code_style", "team/a", "org/qwen_0.6B-lora", "mlp", "lora_A", "default", "v2", "a.b.c", "_x", "x" * 128]
BAD = [
    *("", "../x", "/etc/x", "a/../b", "a//b", "a/", "/a", ".hidden", "-a", "a.", "a-", "a/b.", "a--b", "a b", "a\nb"),
    *("no", "On", "true", "null", "NaN", "1", "1e5", "0x1f", "1_000", "3.14", "2026-11-30", "~", "latest", "x" * 129),
    *("con", "team/NUL", "lpt1.txt", "é", "中文", "a\\b", "C:x", "a@b", "a*", "a\x00b", "a%2E"),
]


@pytest.mark.parametrize("name", GOOD)
def test_good_names_survive_every_spelling(name: str) -> None:
    """Case 41: dots and slashes in names are stored, loaded and listed under the same name."""
    assert check_name(name) == name
    assert name_from_module(module_name(name)) == name
    assert name_from_storage(storage_name(name)) == name
    torch.nn.ModuleDict({module_name(name): torch.nn.Identity()})  # torch itself accepts the spelling


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_refused_with_the_rule_and_the_remedy(name: str) -> None:
    """Case 60: no name leaves the root; words that YAML reads as another type are refused."""
    with pytest.raises(NameNotAllowedError) as caught:
        check_name(name)
    assert caught.value.why
    assert caught.value.remedy


@given(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}){0,2}", fullmatch=True))
def test_spellings_are_reversible_and_one_segment(name: str) -> None:
    try:
        check_name(name)
    except NameNotAllowedError:
        assume(False)
    assert "/" not in storage_name(name)
    assert "." not in module_name(name)
    assert name_from_storage(storage_name(name)) == name
    assert name_from_module(module_name(name)) == name


@given(st.text(max_size=30))
def test_any_text_is_a_name_or_a_typed_error(text: str) -> None:
    try:
        check_name(text)
    except NameNotAllowedError:
        return
    assert text.isascii()
    assert ".." not in text.split("/")


def test_a_new_name_may_not_differ_by_case_only() -> None:
    assert check_new_name("a", ["a", "b"]) == "a"
    with pytest.raises(NameNotAllowedError, match="'Team/A' is not allowed"):
        check_new_name("Team/A", ["team/a"])


@pytest.mark.parametrize("tag", ["latest", "v0123", "v0123456789abcdef", "2026-11-30", "a/b", "no", "1", "", "a b"])
def test_tags_that_look_like_something_else_are_refused(tag: str) -> None:
    with pytest.raises(NameNotAllowedError):
        check_tag(tag)


def test_good_tags() -> None:
    assert [check_tag(tag) for tag in ("best", "v1", "v2.0", "step-100")]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a", "latest"),
        ("a@latest", "latest"),
        ("team/a@v0123456789abcdef", "id"),
        ("a@v0123", "id"),
        ("a@best", "tag"),
        ("a@v1", "tag"),
        ("a@2026-11-30", "moment"),
        ("a@2026-11-30T12:00:00Z", "moment"),
    ],
)
def test_references_are_read(text: str, kind: str) -> None:
    assert Ref.parse(text).kind == kind
    assert Ref.parse(str(Ref.parse(text))) == Ref.parse(text)


def test_a_date_means_its_end_and_a_moment_itself() -> None:
    assert Ref.parse("a@2026-11-30").moment == datetime(2026, 11, 30, 23, 59, 59, 999999, tzinfo=UTC)
    assert Ref.parse("a@2026-11-30T12:00:00Z").moment == datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["a@", "@best", "a@2026-13-40", "a@b@c", "a@../x", "../a@best", "a@{2026-11-30}"])
def test_bad_references_are_typed_errors(text: str) -> None:
    with pytest.raises(NameNotAllowedError):
        Ref.parse(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a", "ref"),
        ("team/a@best", "ref"),
        ("./a", "path"),
        ("/x/a", "path"),
        ("../a", "path"),
        ("C:\\x", "path"),
        ("s3://b/a", "url"),
        ("hf://org/repo@main", "url"),
    ],
)
def test_sources_are_told_apart(text: str, kind: str) -> None:
    assert source_kind(text) == kind


@pytest.mark.parametrize(
    ("key", "adapter", "canonical"),
    [
        ("x.q.lora_A.a.weight", "a", "base_model.model.x.q.lora_A.weight"),
        ("module.base_model.model.x.q.lora_B.a.bias", "a", "base_model.model.x.q.lora_B.bias"),
        (
            "_orig_mod.base_model.model._fsdp_wrapped_module.x.q.lora_A.a.weight",
            "a",
            "base_model.model.x.q.lora_A.weight",
        ),
        (
            "base_model.model._checkpoint_wrapped_module.x.lora_embedding_A.a",
            "a",
            "base_model.model.x.lora_embedding_A",
        ),
        ("base_model.model.x.lora_magnitude_vector.a.weight", "a", "base_model.model.x.lora_magnitude_vector"),
        ("base_model.model.lm_head.modules_to_save.a.weight", "a", "base_model.model.lm_head.weight"),
        ("base_model.model.mlp.up.lora_A.mlp.weight", "mlp", "base_model.model.mlp.up.lora_A.weight"),
        ("base_model.model.a.lora_A.a1.weight", "a1", "base_model.model.a.lora_A.weight"),
        ("base_model.model.lora_A.lora_A.weight", None, "base_model.model.lora_A.lora_A.weight"),
    ],
)
def test_tensor_names_are_canonical_whatever_wraps_the_model(key: str, adapter: str | None, canonical: str) -> None:
    """Cases 38 and 73: the adapter's segment goes by position, wrapper prefixes go wherever they stand."""
    assert canonical_tensor_name(key, adapter) == canonical
