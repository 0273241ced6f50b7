"""Every strategy: identity at its neutral parameters, and its definition on small dense matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from multilora_store.errors import MergeError, PluginError
from multilora_store.merging import MergeSource, Strategy, merge_adapters
from multilora_store.merging.blocks import Block
from multilora_store.merging.lowrank import LowRank
from multilora_store.merging.strategies import elements, spectral
from multilora_store.plugins import Plugin, default_registry

Make = Callable[..., MergeSource]
Dense = Callable[..., Tensor]
NAMES = default_registry().names("merge_strategy")


def find(name: str) -> Strategy:
    return Strategy.find(name)


def test_the_names_are_those_that_are_promised() -> None:
    ours = set(
        "linear cat svd ties dare_linear dare_ties della magnitude_prune breadcrumbs slerp task_arithmetic model_stock "
        "knots core_space tsv iso".split()
    )
    pefts = {f"peft_{name}" for name in ("linear", "cat", "svd")}
    pefts |= {
        f"peft_{name}{end}" for name in "ties dare_linear dare_ties magnitude_prune".split() for end in ("", "_svd")
    }
    assert set(NAMES) == ours | pefts


@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_says_what_it_is(name: str) -> None:
    plugin = default_registry().get("merge_strategy", name)
    chosen = find(name)
    assert plugin.description
    assert chosen.traits.citation
    assert set(chosen.traits.neutral) <= {item.name for item in plugin.parameters}
    assert set(chosen.traits.limits) <= {item.name for item in plugin.parameters}


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}, {"alpha_pattern": {"layers.1.q": 3}}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_adapter_of_weight_1_comes_out_as_it_went_in(
    name: str, fields: dict[str, object], make_adapter: Make, dense: Dense
) -> None:
    """Case 27: rsLoRA sources are not over-scaled, for any strategy."""
    adapter = make_adapter("a", 1, **fields)
    merged = merge_adapters([adapter], [1.0], strategy=name, **find(name).traits.neutral)
    for path in ("layers.0.q", "layers.1.q"):
        torch.testing.assert_close(dense(merged, path), dense(adapter, path), rtol=2e-6, atol=2e-6)
    assert merged.config.scaling_for("layers.0.q") == 1.0
    assert not merged.config.raw["use_rslora"]
    assert merged.report.error < 2e-6


@pytest.mark.parametrize("name", ["linear", "cat", "svd", "task_arithmetic", "peft_cat", "peft_svd"])
def test_the_weighted_sum_has_no_cross_terms(name: str, make_adapter: Make, dense: Dense) -> None:
    """Case 26: weights [1, -1] give A - B. Case 87: the merged delta is the sum of the single ones."""
    a, b = make_adapter("a", 1, r=2, shape=(8, 8)), make_adapter("b", 2, r=2, shape=(8, 8))
    for v, w in ((1.0, -1.0), (0.6, 0.4), (2.0, 0.0)):
        rank = 4 if name in ("svd", "peft_svd") else None
        merged = merge_adapters([a, b], [v, w], strategy=name, rank=rank)
        torch.testing.assert_close(dense(merged), v * dense(a) + w * dense(b), rtol=1e-5, atol=1e-5)
        assert merged.report.error < 1e-6


@pytest.mark.parametrize("name", ["linear", "svd"])
def test_a_lower_rank_is_the_best_one_and_its_error_is_told(name: str, make_adapter: Make, dense: Dense) -> None:
    """Case 26: the error of a truncation is reported, not hidden. Case 124: the factors give the dense SVD's result."""
    a, b = make_adapter("a", 1), make_adapter("b", 2, r=3)
    merged = merge_adapters([a, b], [0.7, 0.3], strategy=name, rank=4)
    total = 0.7 * dense(a) + 0.3 * dense(b)
    u, s, vh = torch.linalg.svd(total)
    torch.testing.assert_close(dense(merged), (u[:, :4] * s[:4]) @ vh[:4], rtol=1e-4, atol=1e-5)
    (module,) = [m for m in merged.report.modules if m.path == "layers.0.q"]
    assert module.error == pytest.approx(float(s[4:].norm() / s.norm()), rel=1e-5)
    assert (module.rank, module.adapters) == (4, 2)


def blocks(*values: list[list[float]]) -> list[Block]:
    return [Block.of(torch.tensor(value)) for value in values]


def test_ties_trims_elects_and_averages_those_that_agree() -> None:
    deltas = blocks([[1.0, -4.0, 3.0, 0.1]], [[2.0, 5.0, -1.0, 0.2]])
    everything = elements.ties(deltas, [1.0, 1.0], density=1.0)
    torch.testing.assert_close(everything, torch.tensor([[1.5, 5.0, 3.0, 0.15]]))
    trimmed = elements.ties(deltas, [1.0, 1.0], density=0.5)
    torch.testing.assert_close(trimmed, torch.tensor([[2.0, 5.0, 3.0, 0.0]]))
    weighted = elements.ties(deltas, [3.0, 1.0], density=1.0, scale=2.0)
    torch.testing.assert_close(weighted[0, 0], torch.tensor(2 * (3 * 1.0 + 2.0) / 4))
    torch.testing.assert_close(weighted[0, 1], torch.tensor(-8.0))  # 3 * -4 outweighs 5
    votes = elements.ties(blocks([[9.0]], [[-1.0]], [[-2.0]]), [1.0] * 3, density=1.0, election="frequency")
    torch.testing.assert_close(votes, torch.tensor([[-1.5]]))
    negative = elements.ties(blocks([[1.0]], [[1.0]]), [1.0, -3.0], density=1.0)
    torch.testing.assert_close(negative, torch.tensor([[-1.0]]))


def test_dare_keeps_the_expected_value() -> None:
    block = [Block.of(torch.ones(400, 400))]
    merged = elements.dare_linear(block, [1.0], density=0.3)
    assert merged.unique().tolist() == pytest.approx([0.0, 1 / 0.3])
    assert float(merged.mean()) == pytest.approx(1.0, abs=0.02)


def test_della_drops_small_elements_more_often_and_keeps_the_expected_value() -> None:
    values = torch.linspace(0.1, 1.0, 100).expand(2000, 100).contiguous()
    merged = elements.della([Block.of(values)], [1.0], density=0.5, spread=0.8)
    kept = (merged != 0).float().mean(dim=0)
    assert float(kept[:10].mean()) < 0.2
    assert float(kept[-10:].mean()) > 0.8
    torch.testing.assert_close(merged.mean(dim=0).mean(), values.mean(), rtol=0.03, atol=0.0)


def test_della_ranks_within_a_row_and_to_one_part_in_64() -> None:
    random = torch.Generator().manual_seed(1)
    values = torch.randn(5, 800, generator=random) * torch.tensor([[1e-6], [1.0], [3.0], [1e3], [1e-3]])
    ladder = elements._by_rank(values, 0.2, 0.8)
    exact = 0.2 + 0.6 * values.abs().argsort(dim=1).argsort(dim=1) / 799
    assert float((ladder - exact).abs().max()) < 0.01
    torch.testing.assert_close(ladder.mean(dim=1), torch.full((5,), 0.5))
    tied = elements._by_rank(torch.tensor([[0.0, 2.0, -2.0, 2.0, 9.0]]), 0.0, 1.0)
    torch.testing.assert_close(tied, torch.tensor([[0.0, 0.5, 0.5, 0.5, 1.0]]))


def test_magnitude_prune_and_breadcrumbs_cut_by_size() -> None:
    deltas = blocks([[1.0, -9.0, 3.0, 2.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]])
    pruned = elements.magnitude_prune(deltas, [2.0], density=0.3)
    assert pruned[0].tolist() == [0.0, -18.0, 6.0, 4.0, 0, 0, 0, 0, 0, 0]
    crumbs = elements.breadcrumbs(deltas, [1.0], density=0.3, outliers=0.1)
    # The largest tenth goes, the next three tenths stay.
    assert crumbs[0].tolist() == [1.0, 0.0, 3.0, 2.0, 0, 0, 0, 0, 0, 0]


def low_rank(seed: int, *, rows: int = 20, columns: int = 14, rank: int = 3) -> LowRank:
    random = torch.Generator().manual_seed(seed)
    return LowRank.of(torch.randn(rows, rank, generator=random), torch.randn(rank, columns, generator=random), 0.5)


def test_slerp_keeps_the_norm_between_deltas_of_one_norm() -> None:
    a, b = low_rank(1), low_rank(2)
    b = b.scaled(a.norm() / b.norm())
    middle = find("slerp").function([a, b], [0.5, 0.5])
    assert middle.norm() == pytest.approx(a.norm(), rel=1e-6)
    torch.testing.assert_close(find("slerp").function([a, b], [1.0, 0.0]).dense(), a.dense())
    torch.testing.assert_close(find("slerp").function([a, a], [0.5, 0.5]).dense(), a.dense())


def test_model_stock_is_the_papers_ratio_times_the_mean() -> None:
    shared = low_rank(1, rank=6)
    deltas = [LowRank.total([shared, low_rank(seed)], [1.0, 0.5]) for seed in (2, 3, 4)]
    cosines = [a.cosine(b) for i, a in enumerate(deltas) for b in deltas[i + 1 :]]
    cosine = sum(cosines) / 3
    ratio = 3 * cosine / (1 + 2 * cosine)
    mean = sum(d.dense() for d in deltas) / 3
    merged = find("model_stock").function(deltas, [2.0, 2.0, 2.0])
    torch.testing.assert_close(merged.dense(), ratio * mean)
    assert 0.5 < ratio < 1.0


def test_an_absent_delta_counts_as_zero_where_weights_are_shares(make_adapter: Make, dense: Dense) -> None:
    a, b = make_adapter("a", 1), make_adapter("b", 2, paths=("layers.0.q",))
    merged = merge_adapters([a, b], [1.0, 3.0], strategy="slerp")
    torch.testing.assert_close(dense(merged, "layers.1.q"), 0.25 * dense(a, "layers.1.q"), rtol=1e-6, atol=1e-6)


def test_knots_merges_the_aligned_right_parts() -> None:
    deltas, weights = [low_rank(1), low_rank(2), low_rank(3)], [0.5, 0.3, 0.2]
    merged = spectral.knots(deltas, weights, method="ties", density=0.4)
    u, s, vh = torch.linalg.svd(torch.cat([d.dense()[0] for d in deltas], dim=1), full_matrices=False)
    kept = int((s > 1e-9 * s[0]).sum())
    parts = torch.split(s[:kept, None] * vh[:kept], 14, dim=1)
    aligned = elements.ties([Block.of(part) for part in parts], weights, density=0.4)
    # Signs of singular vectors cancel between both sides; an election counts a tie of signs as positive only at zero.
    torch.testing.assert_close(merged.dense()[0], u[:, :kept] @ aligned.double(), rtol=1e-4, atol=1e-5)
    plain = spectral.knots(deltas, weights, method="linear")
    torch.testing.assert_close(plain.dense(), LowRank.total(deltas, weights).dense())


def test_core_space_loses_nothing_and_merges_small_cores() -> None:
    deltas, weights = [low_rank(1, rank=2), low_rank(2, rank=4)], [0.7, 0.3]
    plain = spectral.core_space(deltas, weights, method="linear")
    torch.testing.assert_close(plain.dense(), LowRank.total(deltas, weights).dense())
    for method, same in (("tsv", spectral.tsv), ("iso", spectral.iso)):
        # Singular vectors turn with the orthonormal bases, so these two are the same in the core and outside.
        inside = spectral.core_space(deltas, weights, method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(inside.dense(), same(deltas, weights).dense(), rtol=1e-6, atol=1e-6)


def test_tsv_takes_the_interference_out() -> None:
    deltas, weights = [low_rank(1), low_rank(2)], [1.0, 1.0]
    merged = spectral.tsv(deltas, weights)
    parts = [torch.linalg.svd(d.dense()[0], full_matrices=False) for d in deltas]
    left = torch.cat([u[:, :3] for u, _, _ in parts], dim=1)
    right = torch.cat([vh[:3] for _, _, vh in parts])
    sizes = torch.cat([s[:3] for _, s, _ in parts])
    expected = polar(left) @ torch.diag(sizes) @ polar(right)
    torch.testing.assert_close(merged.dense()[0], expected)
    values = torch.linalg.svdvals(merged.dense()[0])[:6]
    torch.testing.assert_close(values, sizes.sort(descending=True).values)
    assert spectral.tsv(deltas, weights, keep=0.3).rank == 2
    same = spectral.tsv([deltas[0], deltas[0]], [0.5, 1.5])
    torch.testing.assert_close(same.dense(), deltas[0].dense())  # no interference to take out: the mean


def polar(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def test_iso_makes_the_directions_weigh_the_same() -> None:
    deltas, weights = [low_rank(1), low_rank(2)], [0.7, 0.3]
    before = torch.linalg.svdvals(LowRank.total(deltas, weights).dense()[0])[:6]
    after = torch.linalg.svdvals(spectral.iso(deltas, weights).dense()[0])
    torch.testing.assert_close(after[:6], before.mean().expand(6))
    assert float(after[6]) < 1e-9
    half = torch.linalg.svdvals(spectral.iso(deltas, weights, isotropy=0.5, scale=2.0).dense()[0])[:6]
    torch.testing.assert_close(half, before + before.mean())
    twice = spectral.iso([deltas[0], deltas[0]], [0.5, 0.5])  # rank 3 in factors of 6 columns
    assert int((torch.linalg.svdvals(twice.dense()[0]) > 1e-9).sum()) == 3


@pytest.mark.parametrize("common", [0.8, 0.5, 0.01])
@pytest.mark.parametrize("ranks", [(12, 12, 12), (3, 3, 4)], ids=["full", "low"])
def test_iso_makes_room_for_what_each_adapter_has_of_its_own(common: float, ranks: tuple[int, ...]) -> None:
    """Algorithm 2 of arXiv 2502.04959 on dense matrices, whose full rank is here the rank that the adapters span."""
    deltas, weights = [low_rank(seed, rank=rank) for seed, rank in enumerate(ranks)], [0.7, -0.3, 0.5]
    dense = [weight * delta.dense()[0] for weight, delta in zip(weights, deltas, strict=True)]
    size = min(sum(ranks), *deltas[0].shape)
    own = min(size // 3, round((size - int(size * common)) / 3))
    u, s, vh = torch.linalg.svd(torch.stack(dense).sum(dim=0), full_matrices=False)
    shared = u[:, : size - 3 * own]
    lefts, sizes, rights = [shared], [s[: size - 3 * own]], [vh[: size - 3 * own]]
    for matrix in dense:
        left, values, right = torch.linalg.svd(matrix - shared @ shared.T @ matrix, full_matrices=False)
        kept = values[:own] > 1e-9
        lefts.append(left[:, :own][:, kept])
        sizes.append(values[:own][kept])
        rights.append(right[:own][kept])
    assert own > 0
    expected = torch.cat(sizes).mean() * polar(torch.cat(lefts, dim=1)) @ polar(torch.cat(rights))
    merged = spectral.iso(deltas, weights, common=common)
    torch.testing.assert_close(merged.dense()[0], expected)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ties", {"density": 0.0}, "density = 0.0 is out of range\ndensity is more than 0 and at most 1"),
        ("ties", {"density": 1.5}, "out of range"),
        ("ties", {"density": math.nan}, "out of range"),
        ("ties", {"density": "half"}, "not of type float"),
        ("ties", {"density": True}, "not of type float"),
        ("ties", {"desnity": 0.5}, "did you mean density"),
        ("ties", {"election": "loudest"}, "not one of 'total', 'frequency'"),
        ("ties", {"scale": math.inf}, "not a finite number"),
        ("peft_ties", {}, "needs the parameter 'density'"),
        ("breadcrumbs", {"outliers": 0.7}, "outliers is at least 0 and at most 0.5"),
        ("linear", {"density": 0.5}, "has no parameter 'density'"),
    ],
)
def test_parameters_are_checked_before_a_value_is_read(
    name: str, params: dict[str, object], message: str, make_adapter: Make
) -> None:
    """Case 29: density 0 is an error, never NaN."""
    adapter = make_adapter("a", 1)
    unreadable = MergeSource(name="a", digest=adapter.digest, config=adapter.config, tensors={}, infos=adapter.infos)
    with pytest.raises(MergeError) as caught:
        merge_adapters([unreadable], [1.0], strategy=name, **params)
    assert message in str(caught.value)


def test_whole_numbers_do_for_real_ones(make_adapter: Make) -> None:
    merged = merge_adapters([make_adapter("a", 1)], [1], strategy="ties", density=1)
    assert merged.recipe["params"]["density"] == 1.0


def test_an_unknown_strategy_lists_the_known_ones(make_adapter: Make) -> None:
    with pytest.raises(PluginError, match="did you mean ties"):
        merge_adapters([make_adapter("a", 1)], [1.0], strategy="tie")


def test_a_plain_function_is_a_strategy_on_deltas(make_adapter: Make, dense: Dense) -> None:
    def halved(deltas: Sequence[LowRank], weights: Sequence[float], *, part: float = 0.5) -> LowRank:
        """Part of the sum."""
        return LowRank.total(deltas, [part * weight for weight in weights])

    mine = Strategy.from_plugin(Plugin(kind="merge_strategy", name="halved", target=halved, origin="mine.py"))
    a = make_adapter("a", 1)
    merged = merge_adapters([a], [1.0], strategy=mine, part=0.25)
    torch.testing.assert_close(dense(merged), 0.25 * dense(a), rtol=1e-6, atol=1e-6)
    assert mine.traits.citation == "mine.py"


def test_a_strategy_that_returns_another_shape_is_named(make_adapter: Make) -> None:
    def wrong(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
        """The delta lying on its side."""
        return deltas[0].transposed

    mine = Strategy.from_plugin(Plugin(kind="merge_strategy", name="wrong", target=wrong, origin="mine.py"))
    with pytest.raises(MergeError, match="'wrong' did not return a delta"):
        merge_adapters([make_adapter("a", 1)], [1.0], strategy=mine)
