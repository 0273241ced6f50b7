"""Adapters really trained with plain PEFT, merged, loaded by PEFT and judged by held-out losses on the real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from multilora_store.merging import MergeSource, export_merged, merge
from multilora_store.storage import Store, import_peft, open_store
from tests.realmodel import EXPECTED_LOSSES, heldout_losses, real_base_folder

__all__ = ["heldout_losses", "real_base_folder"]  # fixtures

Losses = Callable[..., tuple[float, ...]]
WEIGHTS = {"code_style": 0.7, "safety": 0.3}
# PEFT reads deprecated names of transformers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def store(tmp_path: Path, shared: Path) -> Store:
    store = open_store(tmp_path / "store")
    for name in WEIGHTS:
        import_peft(store, shared / "data" / "adapters" / name, name=name)
    return store


def test_an_exact_merge_equals_both_adapters_active_with_the_same_weights(
    real_base_folder: Path, heldout_losses: Losses, store: Store, shared: Path, tmp_path: Path
) -> None:
    """Case 87: merged, active together, and written into the base: the same losses to 1e-4."""
    base = AutoModelForCausalLM.from_pretrained(real_base_folder, dtype=torch.float32)
    folders = {name: shared / "data" / "adapters" / name for name in WEIGHTS}
    model = PeftModel.from_pretrained(base, folders["code_style"], adapter_name="code_style")
    model.load_adapter(folders["safety"], adapter_name="safety")
    model.base_model.set_adapter(list(WEIGHTS))
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name, weight in WEIGHTS.items():
                module.set_scale(name, weight)
    texts = tuple(WEIGHTS)
    expected = heldout_losses(model, texts)
    base = model.unload()
    for strategy, rank in (("linear", None), ("svd", 12)):
        merge(store, WEIGHTS, strategy=strategy, rank=rank, into=strategy)
        merged = PeftModel.from_pretrained(base, store.path(strategy))
        assert heldout_losses(merged, texts) == pytest.approx(expected, abs=1e-4), strategy
        base = merged.unload()
    sources = [MergeSource.stored(name, store.get(name)) for name in WEIGHTS]
    export_merged(real_base_folder, sources, list(WEIGHTS.values()), tmp_path / "folder")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    # The base is stored as bfloat16, to which the sum is rounded once.
    assert heldout_losses(written, texts) == pytest.approx(expected, abs=2e-2)


@pytest.mark.long
def test_a_merge_of_one_adapter_loses_nothing(real_base_folder: Path, heldout_losses: Losses, store: Store) -> None:
    """Case 27: weight 1 gives the adapter back, through every kind of arithmetic."""
    base = AutoModelForCausalLM.from_pretrained(real_base_folder, dtype=torch.float32)
    for strategy, params in (("core_space", {"method": "linear"}), ("ties", {"density": 1.0})):
        merge(store, {"safety": 1.0}, strategy=strategy, into=f"one-{strategy}", **params)
        merged = PeftModel.from_pretrained(base, store.path(f"one-{strategy}"))
        assert heldout_losses(merged) == pytest.approx(EXPECTED_LOSSES[("safety",)], abs=1e-3), strategy
        base = merged.unload()
