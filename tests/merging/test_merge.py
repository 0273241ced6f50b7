"""Merging stored adapters: what is written, what is recorded, and that nothing is written when it should not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multilora_store.errors import ExistsError, MergeError, NameNotAllowedError, NotInStoreError
from multilora_store.merging import MergeSource, diff, merge
from multilora_store.storage import Store, open_store

Make = Callable[..., MergeSource]


@pytest.fixture
def store(tmp_path: Path, make_adapter: Make) -> Store:
    store = open_store(tmp_path / "store")
    for seed, name in enumerate(["a", "b", "team/c"]):
        adapter = make_adapter(name, seed)
        store.put(name, adapter.tensors, adapter.config)
    return store


def test_a_merge_is_a_version_with_its_recipe(store: Store) -> None:
    result = merge(store, {"a": 0.7, "team/c@latest": 0.3}, strategy="ties", into="ac", seed=5, density=0.4)
    assert result.version is not None
    stored = store.get("ac")
    assert stored.version.id == result.version.id
    a, c = store.resolve("a"), store.resolve("team/c")
    assert stored.version.parents == tuple(sorted((f"a@{a.id}", f"team/c@{c.id}")))
    recipe = stored.version.recipe
    assert recipe is not None
    weights = {item["name"]: (item["version"], item["weight"]) for item in recipe["adapters"]}
    assert weights == {"a": (a.id, 0.7), "team/c@latest": (c.id, 0.3)}
    assert (recipe["strategy"], recipe["seed"], recipe["params"]["density"]) == ("ties", 5, 0.4)
    assert recipe["libraries"]["torch"] == torch.__version__
    report = stored.version.metadata["merge_report"]
    assert report["error"] == pytest.approx(result.report.error, rel=1e-5)
    assert [module["path"] for module in report["modules"]] == ["layers.0.q", "layers.1.q"]
    json.dumps(report)


def test_the_same_recipe_gives_the_same_version(store: Store) -> None:
    """Case 88: equal recipes are stored once, whatever the order."""
    first = merge(store, {"a": 0.7, "b": 0.3}, strategy="dare_ties", into="one", seed=1)
    second = merge(store, {"b": 0.3, "a": 0.7}, strategy="dare_ties", into="two", seed=1)
    third = merge(store, {"b": 0.3, "a": 0.7}, strategy="dare_ties", into="three", seed=2)
    assert first.version is not None
    assert second.version is not None
    assert third.version is not None
    assert first.version.id == second.version.id != third.version.id


def test_an_existing_name_is_refused_or_gets_a_version(store: Store) -> None:
    """An existing target is neither overwritten nor silently left as it was."""
    with pytest.raises(ExistsError, match="already has an adapter 'b'"):
        merge(store, {"a": 1.0}, into="b")
    merge(store, {"a": 0.5, "b": 0.5}, into="ab")
    merge(store, {"a": 0.4, "b": 0.6}, into="ab", if_exists="version")
    assert len(store.versions("ab")) == 2
    with pytest.raises(MergeError, match="valid: error, version"):
        merge(store, {"a": 0.5}, into="ab", if_exists="replace")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "fields", "error"),
    [
        ({"a": 0.5, "nobody": 0.5}, {}, NotInStoreError),
        ({"a": 0.5, "b": float("nan")}, {}, MergeError),
        ({"a": 0.5}, {"density": 0.5}, MergeError),
        ({"a": 0.5}, {"rank": 99}, MergeError),
        ({"a": 0.5}, {"into": "no/../name"}, NameNotAllowedError),
    ],
)
def test_a_refused_merge_writes_nothing(
    store: Store, weights: dict[str, float], fields: dict[str, Any], error: type[Exception]
) -> None:
    before = len(store.log())
    with pytest.raises(error):
        merge(store, weights, **({"into": "m"} | fields))
    assert len(store.log()) == before


def test_a_dry_run_writes_nothing(store: Store) -> None:
    before = len(store.log())
    result = merge(store, {"a": 0.5, "b": 0.5}, strategy="svd", into="ab", dry_run=True)
    assert result.version is None
    assert result.report.sampled == 2
    assert result.report.error > 0.1
    assert len(store.log()) == before


def test_a_result_that_reads_back_otherwise_is_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Store.get

    def altered(self: Store, ref: Any) -> Any:
        stored = original(self, ref)
        if str(ref).startswith("ab@"):
            tensors = {name: tensor.clone() for name, tensor in stored.tensors.items()}
            tensors["base_model.model.layers.1.q.lora_B.weight"][0, 0] += 1
            return replace(stored, tensors=tensors)
        return stored

    monkeypatch.setattr(Store, "get", altered)
    with pytest.raises(MergeError, match=r"did not read back .*layers\.1\.q\.lora_B\.weight has other values"):
        merge(store, {"a": 0.5, "b": 0.5}, into="ab")
    assert "ab" not in store.names()


def test_the_base_of_the_parents_is_the_base_of_the_merge(tmp_path: Path, make_adapter: Make) -> None:
    store = open_store(tmp_path / "s")
    base = {"name": "org/base", "fingerprint": "f" * 64}
    for seed, name in enumerate("ab"):
        adapter = make_adapter(name, seed)
        store.put(name, adapter.tensors, adapter.config, base=base)
    other = make_adapter("c", 7)
    store.put("c", other.tensors, other.config, base={**base, "fingerprint": "0" * 64})
    result = merge(store, {"a": 0.5, "b": 0.5}, into="ab")
    assert result.version is not None
    assert result.version.base == base
    with pytest.raises(MergeError, match="made for different bases"):
        merge(store, {"a": 0.5, "c": 0.5}, into="ac")


def test_a_diff_tells_how_two_adapters_relate(store: Store, make_adapter: Make) -> None:
    a = store.get("a")
    doubled = {n: t * (2 if "lora_B" in n else 1) for n, t in a.tensors.items() if "layers.0" in n}
    store.put("twice", doubled, a.config)
    found = diff(store, "a", "twice")
    (module,) = found.modules
    assert module.cosine == pytest.approx(1.0)
    assert module.norms[1] == pytest.approx(2 * module.norms[0])
    assert module.distance == pytest.approx(module.norms[0])
    assert (module.overlap_in, module.overlap_out) == (pytest.approx(1.0), pytest.approx(1.0))
    assert module.sign_conflict == 0.0
    assert found.only == (("layers.1.q",), ())
    assert not found.identical
    assert diff(store, "a", "a@latest").identical
    apart = diff(store, "a", "b")
    assert apart.sign_conflict == pytest.approx(0.5, abs=0.1)
    assert abs(apart.cosine) < 0.5
    json.dumps(apart.to_dict())


def test_overlap_is_the_mean_squared_cosine_of_the_principal_angles(make_adapter: Make) -> None:
    from multilora_store.merging import compare

    a, b = make_adapter("a", 1, r=3), make_adapter("b", 2, r=5, lora_alpha=1)
    found = compare(a, b).modules[0]
    for name, overlap in (("lora_B", found.overlap_out), ("lora_A", found.overlap_in)):
        bases = []
        for source in (a, b):
            tensor: Tensor = source.tensors[f"base_model.model.layers.0.q.{name}.weight"].double()
            bases.append(torch.linalg.qr(tensor if name == "lora_B" else tensor.T).Q)
        cosines = torch.linalg.svdvals(bases[0].T @ bases[1])
        assert overlap == pytest.approx(float(cosines.square().mean()))
    assert compare(a, b).fields["lora_alpha"] == (6, 1)


def test_kinds_without_a_delta_are_not_compared(make_adapter: Make) -> None:
    from multilora_store.merging import compare

    with pytest.raises(MergeError, match="of the kind dora"):
        compare(make_adapter("a", 1), make_adapter("b", 2, use_dora=True))
    with pytest.raises(MergeError, match="another shape"):
        compare(make_adapter("a", 1), make_adapter("b", 2, shape=(24, 20)))
