"""Shrinking: the best adapter of a rank, its error told, its scales where every server finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from multilora_store.errors import MergeError, UsageError
from multilora_store.merging import MergeSource
from multilora_store.merging.shrink import shrink_to_rank


def test_the_error_that_is_told_is_that_of_the_best_approximation(
    make_adapter: Callable[..., MergeSource], dense: Callable[..., Tensor]
) -> None:
    """Case 43: Eckart-Young gives the reference."""
    source = make_adapter("a", 1, r=8)
    shrunk = shrink_to_rank(source.config, source.tensors, 3, name="a", threads=1)
    apart, norm = 0.0, 0.0
    for path in ("layers.0.q", "layers.1.q"):
        values = torch.linalg.svdvals(dense(source, path))
        expected = float(values[3:].square().sum().sqrt())
        assert float((dense(shrunk, path) - dense(source, path)).norm()) == pytest.approx(expected, rel=1e-5)
        apart, norm = apart + expected**2, norm + float(values.square().sum())
    assert shrunk.report.error == pytest.approx((apart / norm) ** 0.5, rel=1e-5)
    assert (shrunk.config.r, shrunk.config.lora_alpha, shrunk.config.max_rank) == (3, 3, 3)


def test_a_rank_that_suffices_loses_nothing(
    make_adapter: Callable[..., MergeSource], dense: Callable[..., Tensor]
) -> None:
    source = make_adapter("a", 1, r=4, alpha_pattern={"layers.1.q": 40}, use_rslora=True)
    for rank in (None, 4, 64):
        shrunk = shrink_to_rank(source.config, source.tensors, rank, threads=1)
        assert shrunk.report.error < 1e-6
        for path in ("layers.0.q", "layers.1.q"):
            assert torch.allclose(dense(shrunk, path), dense(source, path), rtol=1e-5, atol=1e-5)
            assert shrunk.config.scaling_for(path) == 1.0


def test_only_modules_above_the_rank_are_truncated(
    make_adapter: Callable[..., MergeSource], dense: Callable[..., Tensor]
) -> None:
    source = make_adapter("a", 1, r=8)
    small = {name: tensor for name, tensor in make_adapter("b", 2, r=2).tensors.items() if "layers.1" in name}
    config = source.config.replace(rank_pattern={"layers.1.q": 2}, alpha_pattern={"layers.1.q": 4})
    tensors = {**source.tensors, **small}
    shrunk = shrink_to_rank(config, tensors, 4, threads=1)
    reference = MergeSource.in_memory("reference", config, tensors)
    assert torch.allclose(dense(shrunk, "layers.1.q"), dense(reference, "layers.1.q"), rtol=1e-5, atol=1e-5)
    assert (shrunk.config.rank_for("layers.0.q"), shrunk.config.rank_for("layers.1.q")) == (4, 2)
    assert shrunk.report.worst.path == "layers.0.q"


def test_full_tensors_stay_and_what_has_no_delta_is_refused(make_adapter: Callable[..., Any]) -> None:
    head = {"base_model.model.score.weight": torch.randn(3, 16)}
    source = make_adapter("a", 1, r=8, extra=head, modules_to_save=["score"])
    shrunk = shrink_to_rank(source.config, source.tensors, 2, threads=1)
    assert torch.equal(shrunk.tensors["base_model.model.score.weight"], head["base_model.model.score.weight"])
    assert shrunk.config.raw["modules_to_save"] == ["score"]
    with pytest.raises(MergeError, match="dora"):
        shrink_to_rank(source.config.replace(use_dora=True), source.tensors, 2)
    with pytest.raises(UsageError, match="rank 0"):
        shrink_to_rank(source.config, source.tensors, 0)
