"""Rescue: what torch, PEFT and accelerate write for a whole model gives back each adapter, exactly, or says why not."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from launch import results

from multilora_store.assembly.bridge import adapter_names, adapter_parameters
from multilora_store.errors import CoverageError, DamagedError, UnsupportedError, UsageError
from multilora_store.integrations.checkpoints import rescue
from multilora_store.storage import Store, open_store

CONFIGS: dict[str, dict[str, Any]] = {n: {"peft_type": "LORA", **fields} for n, fields in toys.DEFAULTS.items()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def expected() -> dict[str, dict[str, torch.Tensor]]:
    model = toys.build()
    return {
        name: {k: p.detach().clone() for k, p in adapter_parameters(model, name).items()}
        for name in adapter_names(model)
    }


def assert_rescued(store: Store, versions: list[Any], names: tuple[str, ...] = ("a", "b", "c")) -> None:
    wanted = expected()
    assert [version.name for version in versions] == list(names)
    for version in versions:
        held = store.get(version).tensors
        assert sorted(held) == sorted(wanted[version.name])
        assert all(torch.equal(held[key], wanted[version.name][key]) for key in held), version.name


# State dicts.


def test_a_full_state_dict_in_safetensors_gives_every_adapter_in_one_entry(store: Store, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(toys.build().state_dict(), tmp_path / "model.safetensors")
    versions = rescue(store, tmp_path, configs=CONFIGS, tags=("rescued",), step=7)
    assert_rescued(store, versions)
    assert len(store.log()) == 1
    assert store.resolve("b@rescued").step == 7
    assert store.verify().ok


def test_an_index_of_several_safetensors_files_is_followed(store: Store, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = list(toys.build().state_dict().items())
    parts = {"one.safetensors": dict(state[::2]), "two.safetensors": dict(state[1::2])}
    for name, part in parts.items():
        save_file(part, tmp_path / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_rescued(store, rescue(store, tmp_path, configs=CONFIGS))
    index["weight_map"]["x"] = "../one.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="no file beside it"):
        rescue(store, tmp_path, configs=CONFIGS)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_fsdp_wrapped_module."])
def test_a_weights_only_file_is_taken_with_leave_under_any_wrapper(store: Store, tmp_path: Path, prefix: str) -> None:
    state = {prefix + key: value for key, value in toys.build().state_dict().items()}
    torch.save({"model": state, "step": 3, "loss": 0.5}, tmp_path / "last.pt")
    with pytest.raises(UsageError, match="is a pickle"):
        rescue(store, tmp_path / "last.pt", configs=CONFIGS)
    assert_rescued(store, rescue(store, tmp_path / "last.pt", configs=CONFIGS, allow_pickle=True))


def test_an_adapter_only_file_takes_the_one_name_that_is_given(store: Store, tmp_path: Path) -> None:
    from peft import get_peft_model_state_dict

    torch.save(get_peft_model_state_dict(toys.build(), adapter_name="b"), tmp_path / "model.bin")
    with pytest.raises(UsageError, match="one adapter without its name, 3 configs"):
        rescue(store, tmp_path / "model.bin", configs=CONFIGS, allow_pickle=True)
    versions = rescue(store, tmp_path / "model.bin", configs={"b": CONFIGS["b"]}, allow_pickle=True)
    assert_rescued(store, versions, ("b",))


def test_a_config_may_be_a_file_and_an_adapter_without_one_is_named(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIGS["b"]))
    torch.save(toys.build().state_dict(), tmp_path / "m.pt")
    with caplog.at_level(logging.WARNING):
        versions = rescue(store, tmp_path / "m.pt", configs={"b": tmp_path}, allow_pickle=True)
    assert_rescued(store, versions, ("b",))
    assert "also holds a, c, left out" in caplog.text
    with pytest.raises(UsageError, match="holds no adapter 'd'"):
        rescue(store, tmp_path / "m.pt", configs={"d": CONFIGS["b"]}, allow_pickle=True)


def test_names_and_tensors_of_every_kind_come_back(store: Store, tmp_path: Path) -> None:
    """DoRA magnitudes, embeddings, whole modules; names that are words of the tuner or hold a dot."""
    from safetensors.torch import save_file

    import multilora_store as mls

    fields = {
        "lora_A": {"r": 2, "target_modules": ["q_proj"], "use_dora": True},
        "v1.5": {"r": 2, "target_modules": ["embed", "up"], "modules_to_save": ["head"]},
    }
    torch.manual_seed(0)
    model = mls.assemble(toys.Toy(), {n: {"if_missing": "init", "config": c} for n, c in fields.items()})
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "m.safetensors")
    from multilora_store.assembly.bridge import adapter_config

    configs = {name: adapter_config(model, name) for name in fields}
    for version in rescue(store, tmp_path / "m.safetensors", configs=configs):
        live = adapter_parameters(model, version.name)
        held = store.get(version).tensors
        assert sorted(held) == sorted(live)
        assert all(torch.equal(held[key], live[key].detach()) for key in held)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("no_b", CoverageError, "lora_B.weight is missing"),
        ("rank", CoverageError, "has rank 3, its configuration says 4"),
        ("layer", CoverageError, "layers.1.v_proj is a target, but has no tensors"),
        ("empty", DamagedError, "is empty, of shape"),
        ("flat", DamagedError, "is flat, of shape"),
        ("twice", DamagedError, "holds .* twice"),
    ],
)
def test_what_is_not_whole_is_refused_and_nothing_is_stored(
    store: Store, tmp_path: Path, fault: str, error: type[Exception], says: str
) -> None:
    state = dict(toys.build().state_dict())
    a, b = (f"base_model.model.layers.1.v_proj.lora_{side}.a.weight" for side in "AB")
    if fault == "no_b":
        del state[b]
    elif fault == "rank":
        state[a] = state[a][:3]
    elif fault == "layer":
        del state[a], state[b]
    elif fault == "empty":
        state[a] = state[a][:0]
    elif fault == "flat":
        state[a] = state[a].flatten()
    else:
        state["module." + a] = state[a]
    torch.save(state, tmp_path / "m.pt")
    with pytest.raises(error, match=says):
        rescue(store, tmp_path / "m.pt", configs=CONFIGS, allow_pickle=True)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["nothing.pt", "notes.txt", "folder"])
def test_a_path_without_a_checkpoint_says_what_was_expected(store: Store, tmp_path: Path, name: str) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    elif name == "notes.txt":
        (tmp_path / name).write_text("x")
    with pytest.raises(UsageError) as caught:
        rescue(store, tmp_path / name, configs=CONFIGS)
    assert caught.value.remedy
    with pytest.raises(UsageError, match="no configs"):
        rescue(store, tmp_path / name, configs={})


# Sharded checkpoints, written by the real libraries on two ranks.


def write_sharded(folder: str, fsdp: int) -> None:
    """One folder for each way in which accelerate saves a sharded model, and torch's own."""
    warnings.simplefilter("ignore")
    import accelerate.utils.fsdp_utils as theirs
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import multilora_store as mls

    theirs.logger = logging.getLogger("accelerate")  # its own wants an Accelerator, which stays out of this
    accelerator = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    model: Any = toys.build()
    if fsdp == 2:
        model = mls.shard(model)
    else:
        policy = ModuleWrapPolicy({toys.Block})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    kinds = {"dcp": ("SHARDED_STATE_DICT", True), "ranks": ("SHARDED_STATE_DICT", False)}
    kinds |= {"full": ("FULL_STATE_DICT", True)} if fsdp == 2 else {"local": ("LOCAL_STATE_DICT", True)}
    for name, (kind, use_dcp) in kinds.items():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=fsdp,
            state_dict_type=kind,
            cpu_ram_efficient_loading=False,
            reshard_after_forward=True if fsdp == 2 else "FULL_SHARD",
        )
        theirs.save_fsdp_model(plugin, accelerator, model, f"{folder}/{name}", use_dcp=use_dcp)
        dist.barrier()
    if fsdp == 2:
        dcp.save({"app": {"model": model.state_dict(), "step": 3}}, checkpoint_id=f"{folder}/torch")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {fsdp: tmp_path_factory.mktemp(f"fsdp{fsdp}") for fsdp in (1, 2)}
    for fsdp, folder in folders.items():
        results(write_sharded, 2, str(folder), fsdp, timeout=150)
    return folders


WAYS = [(2, "dcp"), (2, "torch"), (2, "ranks"), (2, "full"), (1, "dcp"), (1, "ranks"), (1, "local")]


@pytest.mark.parametrize(("fsdp", "way"), WAYS)
def test_every_sharded_way_gives_back_the_whole_adapters(
    store: Store, sharded: dict[int, Path], fsdp: int, way: str
) -> None:
    """Case 117: what each node holds a part of is put together, or the missing part is named."""
    with pytest.raises(UsageError, match="is a pickle"):
        rescue(store, sharded[fsdp] / way, configs=CONFIGS)
    assert_rescued(store, rescue(store, sharded[fsdp] / way, configs=CONFIGS, allow_pickle=True))


def test_another_python_spells_the_module_of_a_path_otherwise(
    store: Store, sharded: dict[int, Path], tmp_path: Path
) -> None:
    """A checkpoint of Python 3.13 names pathlib._local, which no other has."""
    shutil.copytree(sharded[2] / "torch", tmp_path / "copy")
    file = tmp_path / "copy" / ".metadata"
    told = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)  # in which names are lines
    spelled = {b"cpathlib\n": b"cpathlib._local\n", b"cpathlib._local\n": b"cpathlib\n"}
    [ours] = [name for name in spelled if name in told]
    file.write_bytes(told.replace(ours, spelled[ours]))
    assert_rescued(store, rescue(store, tmp_path / "copy", configs=CONFIGS, allow_pickle=True))


@pytest.mark.parametrize(("fsdp", "way"), WAYS)
def test_the_doctor_knows_every_sharded_way(sharded: dict[int, Path], fsdp: int, way: str) -> None:
    """What it is without opening a pickle; with leave, each adapter of it, and no fault but the lack of configs."""
    from multilora_store.integrations.inspection import inspect_checkpoint

    kinds = {"dcp": "distributed", "torch": "distributed", "ranks": "ranks", "local": "ranks", "full": "torch"}
    closed = inspect_checkpoint(sharded[fsdp] / way)
    assert (closed.recognised.kind, len(closed.adapters)) == (kinds[way], 0)
    assert [one.what for one in closed.findings] == ["it is a pickle, so it was not looked into"]
    found = inspect_checkpoint(sharded[fsdp] / way, allow_pickle=True)
    assert [one.name for one in found.adapters] == ["a", "b", "c"]
    assert not [one for one in found.findings if re.search("empty|flat|partner|NaN|prefix", one.what)]


@pytest.mark.parametrize("way", ["dcp", "ranks"])
def test_the_files_of_a_rank_that_are_missing_are_named(
    store: Store, sharded: dict[int, Path], tmp_path: Path, way: str
) -> None:
    """Case 117: a folder copied from one node only."""
    shutil.copytree(sharded[2] / way, tmp_path / "copy")
    lost = next((tmp_path / "copy").rglob("__1_0.distcp" if way == "dcp" else "*_rank0.bin"))
    lost.unlink()
    with pytest.raises(DamagedError, match="missing"):
        rescue(store, tmp_path / "copy", configs=CONFIGS, allow_pickle=True)
    if way == "ranks":
        shutil.copy(sharded[2] / way / lost.name, lost)
        next((tmp_path / "copy").rglob("*_rank1.bin")).unlink()
        with pytest.raises(DamagedError, match="saved by 2 ranks, there are files of 1"):
            rescue(store, tmp_path / "copy", configs=CONFIGS, allow_pickle=True)


def test_a_single_rank_file_given_by_name_brings_in_the_others(store: Store, sharded: dict[int, Path]) -> None:
    one = sharded[2] / "ranks" / "pytorch_model_fsdp_0_rank1.bin"
    assert_rescued(store, rescue(store, one, configs=CONFIGS, allow_pickle=True))


def test_flat_rows_whose_shape_no_rank_tells_are_refused(store: Store, sharded: dict[int, Path]) -> None:
    config = {**CONFIGS["a"], "r": 5}
    with pytest.raises(CoverageError, match="no multiple of its rank 5"):
        rescue(store, sharded[1] / "local", configs={"a": config}, allow_pickle=True)


def test_a_flat_saved_module_is_refused(store: Store, tmp_path: Path) -> None:
    state = {"x._flat_param": torch.zeros(4), "base_model.model.head.modules_to_save.a.weight": torch.zeros(4)}
    torch.save(state, tmp_path / "pytorch_model_fsdp_rank0.bin")
    with pytest.raises(UnsupportedError, match="the shape of"):
        rescue(store, tmp_path, configs={"a": CONFIGS["a"]}, allow_pickle=True)


# Nothing is executed.


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE_TARGET"],)


@pytest.mark.parametrize("kind", ["torch", "rank", "metadata"])
def test_a_pickle_that_names_code_is_refused_and_the_code_not_run(
    store: Store, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "ran"
    monkeypatch.setenv("HOSTILE_TARGET", str(target))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if kind == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(_Hostile()))
    elif kind == "torch":
        torch.save({"x": _Hostile()}, folder / "pytorch_model.bin")
    else:  # the first name is one that weights-only loading refuses and the unpickler of shards takes
        from torch.distributed._shard.sharded_tensor import ShardedTensor

        torch.save({"a": ShardedTensor, "x": _Hostile()}, folder / "pytorch_model_fsdp_0_rank0.bin")
    with pytest.raises(DamagedError) as caught:
        rescue(store, folder, configs=CONFIGS, allow_pickle=True)
    assert "mkdir" in caught.value.why
    assert not target.exists()
