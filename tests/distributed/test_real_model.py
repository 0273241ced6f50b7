"""Adapters trained on a real language model: plain PEFT's losses, sharded, and after save and restore."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from launch import results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from realmodel import ADAPTERS, EXPECTED_LOSSES, TEXTS, heldout_loss_by_ranks, real_base_folder

__all__ = ["real_base_folder"]


def sharded_losses(
    folder: str, shared: str, store_url: str, saved_url: str, backend: str, mode: str, whole: bool
) -> dict[Any, Any]:
    """Losses by active adapters on their texts, of one adapter or, if `whole`, of the table.

    `mode` is `save` after loading, or `restore` into fresh adapters.
    """
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from multilora_store.assembly import assemble, build_base
    from multilora_store.distributed import activate, restore, save, shard
    from multilora_store.storage import open_store

    alone = mode == "restore" and backend == "fsdp2"  # one rank reads the base, the others get their shards from it
    device = "meta" if alone and dist.get_rank() else "cpu"
    base = build_base("hf", path=folder, dtype="float32", device=device)
    store = open_store(store_url)
    if mode == "restore":
        configs = {name: dict(store.get(name).config.raw) for name in ADAPTERS}
        specs = {name: {"if_missing": "init", "source": f"new-{name}", "config": c} for name, c in configs.items()}
        model: Any = assemble(base, specs, store=store, device=device)
    else:
        model = assemble(base, {name: name for name in ADAPTERS}, store=store)
    if backend != "plain":
        model = shard(model, backend=backend, reshard_after_forward=False)
    if mode == "restore":
        restore(model, open_store(saved_url))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = {}
    each = [(name,) for name in ADAPTERS]
    wanted = each[-1:]
    if whole:
        wanted = list(EXPECTED_LOSSES) if mode == "save" else each
    for active in wanted:
        activate(model, dict.fromkeys(active, 1.0))
        texts = active or ("safety",)
        found[active] = {text: heldout_loss_by_ranks(model, tokenizer, Path(shared), text) for text in texts}
    if mode == "save":
        save(model, open_store(saved_url), step=1)
    return found


def check(found: list[dict[Any, Any]]) -> None:
    for each in found:
        for active, losses in each.items():
            for text, loss in losses.items():
                assert loss == pytest.approx(EXPECTED_LOSSES[active][TEXTS.index(text)], abs=1e-3), (active, text)


@pytest.mark.slow
@pytest.mark.timeout(5000)
@pytest.mark.parametrize(
    ("backend", "whole"), [("fsdp2", True), ("fsdp1", False), pytest.param("fsdp1", True, marks=pytest.mark.long)]
)
def test_sharded_losses_equal_those_of_plain_peft(
    backend: str, whole: bool, shared: Path, real_base_folder: Path, tmp_path: Path
) -> None:
    """2 ranks load and save, 4 ranks (the base on one) and 1 process restore: plain PEFT's losses to 1e-3 nats."""
    from multilora_store.storage import import_peft, open_store

    store = open_store(tmp_path / "store")
    for name in ADAPTERS:
        import_peft(store, shared / "data" / "adapters" / name, name=name)
    places = (str(real_base_folder), str(shared), str(tmp_path / "store"), str(tmp_path / "saved"))
    check(results(sharded_losses, 2, *places, backend, "save", whole, timeout=1500))
    saved = open_store(tmp_path / "saved")
    for name in ADAPTERS:
        assert saved.resolve(name).digest == store.resolve(name).digest, "the same content, the same version"
    check(results(sharded_losses, 4, *places, backend, "restore", whole, timeout=1500))
    if backend == "fsdp2":
        check(results(sharded_losses, 1, *places, "plain", "restore", False, timeout=1500))
