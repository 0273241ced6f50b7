"""Merging in memory: determinism, honest configurations, and a clear no to what cannot be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from multilora_store.errors import MergeError
from multilora_store.merging import MergeSource, Strategy, merge_adapters
from multilora_store.merging.capability import KINDS, kinds_of, table
from multilora_store.merging.source import canonical_order
from multilora_store.plugins import default_registry

Make = Callable[..., MergeSource]
Dense = Callable[..., Tensor]
RANDOM = ("dare_linear", "dare_ties", "della", "peft_dare_ties", "peft_dare_linear_svd")
NAMES = default_registry().names("merge_strategy")


def parameters(name: str) -> dict[str, Any]:
    known = {item.name for item in default_registry().get("merge_strategy", name).parameters}
    return {"density": 0.5} if "density" in known else {}


def same_bytes(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", NAMES)
def test_one_recipe_gives_one_result_for_any_order_and_number_of_threads(name: str, make_adapter: Make) -> None:
    """Case 88: the same recipe gives the same bytes."""
    adapters = [make_adapter("a", 1), make_adapter("b", 2), make_adapter("c", 3)]
    weights = [0.5, 0.3, 0.2]
    if name == "slerp":
        adapters, weights = adapters[:2], weights[:2]
    if name == "model_stock":
        adapters = [sharing_a_start(make_adapter, seed) for seed in (1, 2, 3)]
    results = []
    for order, threads in zip(itertools.permutations(range(len(adapters))), (1, 2, 3, 1, 2, 3), strict=False):
        results.append(
            merge_adapters(
                [adapters[i] for i in order],
                [weights[i] for i in order],
                strategy=name,
                threads=threads,
                **parameters(name),
            )
        )
    assert all(same_bytes(results[0].tensors, other.tensors) for other in results[1:])
    assert all(results[0].config.to_json() == other.config.to_json() for other in results[1:])
    assert all(results[0].recipe == other.recipe for other in results[1:])
    assert all(results[0].report == other.report for other in results[1:])


def sharing_a_start(make_adapter: Make, seed: int) -> MergeSource:
    start, own = make_adapter("start", 99), make_adapter("own", seed)
    tensors = {name: start.tensors[name] + 0.3 * own.tensors[name] for name in start.tensors}
    return MergeSource.in_memory(f"m{seed}", start.config, tensors)


@pytest.mark.parametrize("name", RANDOM)
def test_the_seed_is_a_part_of_the_recipe(name: str, make_adapter: Make) -> None:
    """Case 88: another seed gives another result."""
    adapters = [make_adapter("a", 1), make_adapter("b", 2)]
    results = [merge_adapters(adapters, [0.5, 0.5], strategy=name, seed=seed, density=0.5) for seed in (1, 1, 2)]
    assert same_bytes(results[0].tensors, results[1].tensors)
    assert not same_bytes(results[0].tensors, results[2].tensors)
    assert results[2].recipe["seed"] == 2


def test_masks_follow_the_content_not_the_name(make_adapter: Make) -> None:
    adapter = make_adapter("a", 1)
    renamed = MergeSource.in_memory("z", adapter.config, adapter.tensors)
    results = [merge_adapters([one], [1.0], strategy="dare_linear", density=0.5) for one in (adapter, renamed)]
    assert same_bytes(results[0].tensors, results[1].tensors)


def test_dense_results_do_not_depend_on_the_memory_budget(make_adapter: Make) -> None:
    adapters = [make_adapter("a", 1, shape=(90, 70)), make_adapter("b", 2, shape=(90, 70))]
    results = [
        merge_adapters(adapters, [0.5, 0.5], strategy="ties", truncation="randomised", memory_budget=budget, rank=5)
        for budget in (1, 10**9)
    ]
    assert same_bytes(results[0].tensors, results[1].tensors)
    exact = merge_adapters(adapters, [0.5, 0.5], strategy="ties", truncation="exact", rank=5)
    assert exact.report.error <= results[0].report.error <= 1.1 * exact.report.error


def test_the_threads_of_torch_are_as_before(make_adapter: Make) -> None:
    before = torch.get_num_threads()
    merge_adapters([make_adapter("a", 1)], [1.0], threads=2)
    with pytest.raises(MergeError):
        merge_adapters([poisoned(make_adapter)], [1.0], threads=2)
    assert torch.get_num_threads() == before


def poisoned(make_adapter: Make) -> MergeSource:
    adapter = make_adapter("a", 1)
    tensors = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
    tensors["base_model.model.layers.1.q.lora_B.weight"][0, 0] = math.nan
    return MergeSource.in_memory("a", adapter.config, tensors)


def test_values_that_are_not_finite_are_refused_by_name(make_adapter: Make) -> None:
    with pytest.raises(MergeError, match=r"'a' holds values that are not finite in module layers\.1\.q"):
        merge_adapters([poisoned(make_adapter)], [1.0])


def test_a_result_that_overflows_its_dtype_is_refused(make_adapter: Make) -> None:
    """Case 29: a non-finite merged tensor stops the merge."""
    adapter = make_adapter("a", 1, dtype=torch.float16)
    with pytest.raises(MergeError, match="not finite; nothing was written"):
        merge_adapters([adapter], [1e5])


def test_a_tiny_density_gives_numbers_never_nan(make_adapter: Make) -> None:
    """Case 29: density 1e-9 keeps nothing or little, and is never divided by zero."""
    adapters = [make_adapter("a", 1), make_adapter("b", 2)]
    with pytest.raises(MergeError, match="made every delta zero"):
        merge_adapters(adapters, [0.5, 0.5], strategy="dare_linear", density=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_double_and_comes_back_as_it_was(
    dtype: torch.dtype, make_adapter: Make, dense: Dense
) -> None:
    """Case 90: an SVD merge of half-precision adapters works on the CPU."""
    a, b = make_adapter("a", 1, dtype=dtype), make_adapter("b", 2, dtype=dtype)
    for strategy in ("svd", "ties"):
        merged = merge_adapters([a, b], [0.5, 0.5], strategy=strategy)
        assert {tensor.dtype for tensor in merged.tensors.values()} == {dtype}
    mixed = merge_adapters([a, make_adapter("b", 2)], [0.5, 0.5])
    assert {tensor.dtype for tensor in mixed.tensors.values()} == {torch.float32}
    asked = merge_adapters([a, b], [0.5, 0.5], dtype="float32")
    torch.testing.assert_close(dense(asked), 0.5 * dense(a) + 0.5 * dense(b), rtol=1e-6, atol=1e-6)
    with pytest.raises(MergeError, match="did you mean float32"):
        merge_adapters([a], [1.0], dtype="float23")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5], "1 weights for 2 adapters"),
        ([0.5, 0.3, 0.2], "3 weights for 2 adapters"),
        ([0.5, math.nan], "the weight of 'b' is nan, not a finite number"),
        ([0.5, math.inf], "not a finite number"),
        ([0.5, "much"], "not a finite number"),
        ([True, 0.5], "the weight of 'a' is True"),
        ([0.0, 0.0], "all weights are zero"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: list[Any], message: str, make_adapter: Make) -> None:
    with pytest.raises(MergeError) as caught:
        merge_adapters([make_adapter("a", 1), make_adapter("b", 2)], weights)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_number_of_adapters_and_the_signs_fit_the_strategy(make_adapter: Make) -> None:
    adapters = [make_adapter(name, seed) for seed, name in enumerate("abc")]
    with pytest.raises(MergeError, match="no adapter to merge"):
        merge_adapters([], [])
    with pytest.raises(MergeError, match="at most 2"):
        merge_adapters(adapters, [0.4, 0.3, 0.3], strategy="slerp")
    with pytest.raises(MergeError, match=r"'b' is -1, but slerp takes weights as shares"):
        merge_adapters(adapters[:2], [1.0, -1.0], strategy="slerp")
    with pytest.raises(MergeError, match="'a' was named twice"):
        merge_adapters([adapters[0], adapters[0]], [0.5, 0.5])


@pytest.mark.parametrize(
    ("strategy", "rank", "message"),
    [
        ("svd", 0, "a rank is a whole number of at least 1"),
        ("svd", True, "a rank is a whole number"),
        ("svd", 2.0, "a rank is a whole number"),
        ("svd", 9, "the most is 8, at layers.0.q"),
        ("ties", 17, "the most is 16, at layers.0.q"),
        ("cat", 4, "takes no rank"),
        ("peft_ties", 4, "takes no rank"),
    ],
)
def test_ranks_that_cannot_be_are_refused(strategy: str, rank: Any, message: str, make_adapter: Make) -> None:
    adapters = [make_adapter("a", 1), make_adapter("b", 2)]
    with pytest.raises(MergeError) as caught:
        merge_adapters(adapters, [0.5, 0.5], strategy=strategy, rank=rank, **parameters(strategy))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": "x"}, "a seed is a whole number"),
        ({"truncation": "rough"}, "valid: auto, exact, randomised"),
        ({"threads": 0}, "at least 1 thread"),
        ({"memory_budget": 0}, "a number of bytes above 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str, make_adapter: Make) -> None:
    with pytest.raises(MergeError) as caught:
        merge_adapters([make_adapter("a", 1)], [1.0], **settings)
    assert message in str(caught.value)


def test_the_rank_is_never_above_what_the_matrix_can_have(make_adapter: Make, dense: Dense) -> None:
    adapters = [make_adapter(str(seed), seed, r=6, shape=(10, 8)) for seed in range(3)]
    merged = merge_adapters(adapters, [0.5, 0.3, 0.2])
    assert merged.config.r == 8
    expected = 0.5 * dense(adapters[0]) + 0.3 * dense(adapters[1]) + 0.2 * dense(adapters[2])
    torch.testing.assert_close(dense(merged), expected, rtol=1e-5, atol=1e-5)
    assert merge_adapters(adapters, [0.5, 0.3, 0.2], strategy="cat").config.r == 18


def test_adapters_of_other_shapes_or_bases_are_refused(make_adapter: Make) -> None:
    a, b = make_adapter("a", 1), make_adapter("b", 2, shape=(24, 20))
    with pytest.raises(MergeError, match=r"layers\.0\.q differs between"):
        merge_adapters([a, b], [0.5, 0.5])
    bases = [
        MergeSource(
            name=s.name, digest=s.digest, config=s.config, tensors=s.tensors, infos=s.infos, base={"fingerprint": f}
        )
        for s, f in ((a, "one"), (make_adapter("c", 3), "two"))
    ]
    with pytest.raises(MergeError, match="made for different bases"):
        merge_adapters(bases, [0.5, 0.5])
    named = make_adapter("d", 4, base_model_name_or_path="org/other")
    merged = merge_adapters([a, named], [0.5, 0.5])
    assert merged.report.notes == ("the adapters name different bases: None, org/other",)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"use_dora": True}, "dora"),
        ({"init_lora_weights": "pissa_niter_4"}, "mutated_base"),
        ({"init_lora_weights": "olora"}, "mutated_base"),
        ({"init_lora_weights": "corda"}, "mutated_base"),
        ({"alora_invocation_tokens": [1, 2]}, "alora"),
        ({"trainable_token_indices": [1]}, "trainable_tokens"),
        ({"use_qalora": True}, "qalora"),
        ({"peft_type": "ADALORA"}, "adalora"),
        ({"peft_type": "LOHA"}, "other_method"),
    ],
)
@pytest.mark.parametrize("strategy", ["ties", "linear", "peft_svd"])
def test_kinds_that_have_no_delta_are_refused_by_name(
    strategy: str, fields: dict[str, Any], kind: str, make_adapter: Make
) -> None:
    """Case 93: AdaLoRA with ties lists what is supported. Case 62: PiSSA, OLoRA and CorDA do not mix with others."""
    odd = make_adapter("odd", 1, **fields)
    unreadable = MergeSource(name="odd", digest=odd.digest, config=odd.config, tensors={}, infos=odd.infos)
    with pytest.raises(MergeError) as caught:
        merge_adapters([make_adapter("a", 2), unreadable], [0.5, 0.5], strategy=strategy, **parameters(strategy))
    message = str(caught.value)
    assert f"'{strategy}' cannot take adapter 'odd': it is of the kind {kind}" in message
    assert f"{strategy} takes: linear, embedding, conv" in message
    assert f"no strategy takes {kind}" in message


def test_the_table_is_what_happens(make_adapter: Make) -> None:
    """Case 93: strategy x kind, with the kinds that some strategies take and others do not."""
    strategies = [Strategy.find(name) for name in NAMES]
    cells = table(strategies)
    assert set(cells) == set(NAMES)
    assert all(list(row) == list(KINDS) for row in cells.values())
    for chosen in strategies:
        row = cells[chosen.name]
        for kind, adapters in odd_sets(make_adapter).items():
            weights = [0.5] * len(adapters)
            if row[kind] is None:
                merge_adapters(adapters, weights, strategy=chosen, **parameters(chosen.name))
            else:
                with pytest.raises(MergeError, match=f"of the kind {kind}"):
                    merge_adapters(adapters, weights, strategy=chosen, **parameters(chosen.name))


def odd_sets(make_adapter: Make) -> dict[str, list[MergeSource]]:
    bias = {"base_model.model.layers.0.q.lora_B.bias": torch.ones(24)}
    bias["base_model.model.layers.1.q.lora_B.bias"] = torch.ones(24)
    experts = {
        "base_model.model.mlp.experts.lora_A.weight": torch.randn(6, 5),
        "base_model.model.mlp.experts.lora_B.weight": torch.randn(7, 6),
    }
    return {
        "unequal_ranks": [sharing_a_start(make_adapter, 1), make_adapter("b", 99, r=5)],
        "lora_bias": [make_adapter("b", 1, extra=bias, lora_bias=True)],
        "experts": [
            MergeSource.in_memory(
                "e",
                {"peft_type": "LORA", "r": 2, "target_modules": [], "target_parameters": ["mlp.experts.up"]},
                experts,
            )
        ],
        "rank_pattern": [make_adapter("p", 1, alpha_pattern={"layers.0.q": 3})],
        "rslora": [make_adapter("s", 1, use_rslora=True)],
    }


def test_kinds_are_told_from_tensors_too(make_adapter: Make) -> None:
    magnitude = {"base_model.model.layers.0.q.lora_magnitude_vector": torch.ones(24)}
    adapter = make_adapter("a", 1, extra=magnitude)
    assert "dora" in kinds_of(adapter.config, adapter.layout)
    with pytest.raises(MergeError, match="of the kind dora"):
        merge_adapters([adapter], [1.0])


def test_lora_biases_follow_the_weighted_sum(make_adapter: Make) -> None:
    bias = {f"base_model.model.layers.{i}.q.lora_B.bias": torch.full((24,), 2.0) for i in (0, 1)}
    a, b = make_adapter("a", 1, extra=bias, lora_bias=True), make_adapter("b", 2)
    merged = merge_adapters([a, b], [0.5, 0.5], strategy="task_arithmetic", scale=3.0)
    # scale 2 of the pair, weight 0.5, the strategy's 3
    torch.testing.assert_close(merged.tensors["base_model.model.layers.0.q.lora_B.bias"], torch.full((24,), 6.0))
    assert merged.config.raw["lora_bias"] is True


def test_grouped_experts_are_merged_expert_by_expert() -> None:
    def experts(name: str, seed: int, r: int, **fields: Any) -> MergeSource:
        random = torch.Generator().manual_seed(seed)
        prefix = "base_model.model.mlp.experts"
        return MergeSource.in_memory(
            name,
            {"peft_type": "LORA", "r": r, "target_modules": [], "target_parameters": ["experts.up", "experts.down"]}
            | fields,
            {
                f"{prefix}.lora_A.weight": torch.randn(3 * r, 5, generator=random),
                f"{prefix}.lora_B.weight": torch.randn(7, 3 * r, generator=random),
                f"{prefix}.base_layer.lora_A.weight": torch.randn(3 * r, 9, generator=random),
                f"{prefix}.base_layer.lora_B.weight": torch.randn(5, 3 * r, generator=random),
            },
        )

    a, b = experts("a", 1, 2), experts("b", 2, 3)
    for strategy in ("linear", "ties", "knots"):
        merged = merge_adapters([a, b], [0.5, 0.5], strategy=strategy)
        again = MergeSource.in_memory("m", merged.config, merged.tensors)
        assert (merged.config.r, again.layout.pairs["mlp.experts"].groups) == (5, 3)
        if strategy == "linear":
            for path, pair in again.layout.pairs.items():
                expected = sum(0.5 * one.layout.pairs[path].read(one.tensors).dense() for one in (a, b))
                torch.testing.assert_close(pair.read(again.tensors).dense(), expected, rtol=1e-5, atol=1e-5)
    other = experts("c", 3, 2, target_parameters=["experts.up"])
    with pytest.raises(MergeError, match="target_parameters differs between"):
        merge_adapters([a, other], [0.5, 0.5])


def head(value: float, *, name: str = "lm_head", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {f"base_model.model.{name}.weight": torch.full((4, 3), value, dtype=dtype)}


def test_modules_trained_in_full_need_a_rule(make_adapter: Make) -> None:
    """Case 30: merging a head with none demands a rule. Case 94: the list of what is trained in full is shown."""
    a = make_adapter("a", 1, extra=head(1.0), modules_to_save=["lm_head"])
    b = make_adapter("b", 2, extra=head(5.0) | head(7.0, name="emb"), modules_to_save=["lm_head", "emb"])
    with pytest.raises(MergeError) as caught:
        merge_adapters([a, b], [0.25, 0.75])
    assert "2 tensors are trained in full and need a rule: emb.weight (in b); lm_head.weight (in a, b)" in str(
        caught.value
    )

    def merged(rule: Any, order: tuple[int, int] = (0, 1)) -> tuple[float, float]:
        pairs = [((a, 0.25), (b, 0.75))[i] for i in order]
        done = merge_adapters([s for s, _ in pairs], [w for _, w in pairs], modules_to_save=rule)
        assert done.config.raw["modules_to_save"] == ["emb", "lm_head"]
        return tuple(float(done.tensors[f"base_model.model.{n}.weight"][0, 0]) for n in ("lm_head", "emb"))  # type: ignore[return-value]

    assert merged("first") == (1.0, 7.0)
    assert merged("first", (1, 0)) == (5.0, 7.0)
    assert merged("mean") == merged("mean", (1, 0)) == (4.0, 7.0)
    assert merged({"lm_head": "b", "emb": "first"}) == (5.0, 7.0)
    b = replace(b, name="b@v0123456789abcdef")  # as a reference from the command line
    assert merged({"lm_head": "b", "emb": b.name}) == (5.0, 7.0)
    with pytest.raises(MergeError, match=r"emb\.weight \(in b@v0123456789abcdef\)"):
        merge_adapters([a, b], [0.25, 0.75], modules_to_save={"lm_head": "mean"})
    with pytest.raises(MergeError, match=r"'average' is no rule for emb\.weight"):
        merge_adapters([a, b], [0.25, 0.75], modules_to_save="average")


def test_a_mean_needs_one_shape_and_weights_that_are_shares(make_adapter: Make) -> None:
    a = make_adapter("a", 1, extra=head(1.0))
    b = make_adapter("b", 2, extra=head(1.0, dtype=torch.bfloat16))
    with pytest.raises(MergeError, match=r"lm_head\.weight has no mean"):
        merge_adapters([a, b], [0.5, 0.5], modules_to_save="mean")
    c = make_adapter("c", 3, extra=head(2.0))
    with pytest.raises(MergeError, match="has no mean with the weights"):
        merge_adapters([a, c], [1.0, -0.5], modules_to_save="mean")


def test_the_merged_configuration_selects_the_merged_modules(make_adapter: Make) -> None:
    a = make_adapter("a", 1)
    agreed = merge_adapters([a, make_adapter("b", 2)], [0.5, 0.5]).config.raw
    assert agreed["target_modules"] == ["q"]
    joined = merge_adapters([a, make_adapter("b", 2, paths=("layers.0.v",))], [0.5, 0.5]).config
    assert joined.raw["target_modules"] == ["q", "v"]
    assert (joined.r, joined.raw["rank_pattern"]) == (4, {})
    listed = make_adapter("b", 2, paths=("layers.0.v",), layers_to_transform=[0])
    spelled = merge_adapters([a, listed], [0.5, 0.5]).config.raw
    assert spelled["target_modules"] == ["layers.0.q", "layers.0.v", "layers.1.q"]
    assert spelled["layers_to_transform"] is None
    regex = merge_adapters([a, make_adapter("b", 2, target_modules=r".*\.q")], [0.5, 0.5]).config.raw
    assert regex["target_modules"] == ["layers.0.q", "layers.1.q"]


def test_ranks_that_differ_between_modules_are_stated_for_each(make_adapter: Make) -> None:
    a = make_adapter("a", 1, paths=("layers.0.q", "layers.1.q", "layers.0.v"))
    b = make_adapter("b", 2, r=3, paths=("layers.0.q",), use_rslora=True)
    config = merge_adapters([a, b], [0.5, 0.5]).config
    assert config.r == 4
    assert config.raw["rank_pattern"] == config.raw["alpha_pattern"] == {r"^layers\.0\.q": 7}
    assert [config.scaling_for(path) for path in ("layers.0.q", "layers.1.q", "layers.0.v")] == [1.0] * 3


def test_a_dry_run_tells_cost_and_loss_from_a_sample(make_adapter: Make) -> None:
    paths = tuple(f"layers.{i}.q" for i in range(40))
    adapters = [make_adapter("a", 1, paths=paths), make_adapter("b", 2, paths=paths)]
    dry = merge_adapters(adapters, [0.5, 0.5], strategy="svd", dry_run=True)
    real = merge_adapters(adapters, [0.5, 0.5], strategy="svd")
    assert (dry.tensors, dry.report.sampled, len(dry.report.modules)) == ({}, 40, 8)
    assert dry.report.bytes == real.report.bytes
    assert dry.report.error == pytest.approx(real.report.error, rel=0.2)
    assert dry.config.to_json() == real.config.to_json()
    assert dry.report.seconds > 0


def test_the_canonical_order_is_that_of_the_content(make_adapter: Make) -> None:
    adapters = [make_adapter(str(seed), seed) for seed in range(4)]
    ordered = canonical_order(adapters, [1.0, 2.0, 3.0, 4.0])
    assert [source.digest for source, _ in ordered] == sorted(source.digest for source in adapters)
    assert {source.name: weight for source, weight in ordered} == {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0}
