"""What PEFT wrote we take, and what we write PEFT reads."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from samples import CONFIG, same, tensors

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import ConfigError, DamagedError, ExistsError, NameNotAllowedError, UsageError
from multilora_store.storage import Store, export_adapter, import_peft, open_store, read_peft_dir, sync
from multilora_store.storage.codec import encode
from multilora_store.storage.peft_dirs import FoundAdapter, plan_import

MODEL, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def write(folder: Path, seed: int, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL).write_bytes(b"".join(bytes(part) for part in encode(tensors(seed)).parts))
    (folder / CONFIG_FILE).write_text(json.dumps(config or CONFIG, indent=3))
    return folder


def test_real_adapters_keep_their_bytes(store: Store, shared: Path, tmp_path: Path) -> None:
    versions = import_peft(store, shared / "data/adapters", prefix="demo/")
    assert [version.name for version in versions] == ["demo/code_style", "demo/safety", "demo/zh_tone"]
    assert len(store.log()) == 1
    for version in versions:
        original = shared / "data/adapters" / version.name.removeprefix("demo/")
        exported = export_adapter(store, version.name, tmp_path / version.name)
        for file in (MODEL, CONFIG_FILE):
            assert (store.path(version) / file).read_bytes() == (original / file).read_bytes()
            assert (exported / file).read_bytes() == (original / file).read_bytes()
        assert same(store.get(version.name).tensors, read_peft_dir(original).tensors)
    assert store.verify().ok
    assert import_peft(store, shared / "data/adapters", prefix="demo/")[0].directory == versions[0].directory


def test_ranks_that_contradict_the_configuration_are_not_imported(store: Store, tmp_path: Path) -> None:
    """Case 2: PEFT would fail to load it; it is refused at the door, with the tensor, and nothing comes in."""
    write(tmp_path / "several/good", 1)
    write(tmp_path / "several/wrong", 2, {**CONFIG, "r": 3})
    for take in (lambda: import_peft(store, tmp_path / "several"), lambda: sync(tmp_path / "several", store)):
        with pytest.raises(UsageError, match=r"wrong contradicts itself: tensor .*has rank 2, .* says 3"):
            take()
    assert not (tmp_path / "store").exists()
    assert len(import_peft(store, tmp_path / "several", allow_rank_mismatch=True)) == 2
    assert {finding.kind for finding in store.verify().findings} == {"shape"}


def test_remote_real_adapters_are_equal(shared: Path, memory_url: str) -> None:
    """Case 113: the same adapter from a folder, from memory and through a store."""
    store = open_store(memory_url + "/store")
    version = import_peft(store, shared / "data/adapters/safety")[0]
    assert version.name == "safety"
    url = export_adapter(store, "safety", memory_url + "/plain")
    assert url == memory_url + "/plain"
    assert same(read_peft_dir(memory_url + "/plain").tensors, read_peft_dir(shared / "data/adapters/safety").tensors)
    assert import_peft(store, memory_url + "/plain", name="again")[0].id == version.id


def _tiny_model() -> torch.nn.Module:
    """A module with the names that the samples are for."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(8, 8, bias=False)
            self.v_proj = torch.nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q_proj(x) + self.v_proj(x)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.self_attn(x))

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.model.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    return Tiny()


def test_peft_reads_what_we_write_and_we_read_what_peft_writes(store: Store, tmp_path: Path) -> None:
    """Case 103: the file loads into a fresh PEFT model with nothing missing and nothing unexpected."""
    peft = pytest.importorskip("peft")
    store.put("a", tensors(0), CONFIG)
    store.put("b", tensors(1), CONFIG)
    model = peft.PeftModel.from_pretrained(_tiny_model(), store.path("a"), adapter_name="default")
    model.load_adapter(store.path("b"), adapter_name="b")
    state = peft.get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    assert same(state, tensors(0))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    versions = import_peft(store, tmp_path / "saved", prefix="back/")
    assert [version.name for version in versions] == ["back/b", "back/default"]
    assert same(store.get("back/default").tensors, tensors(0))
    assert same(store.get("back/b").tensors, tensors(1))
    reread = peft.PeftModel.from_pretrained(_tiny_model(), store.path("back/default"))
    model.set_adapter("default")
    torch.testing.assert_close(reread(x), model(x), rtol=0, atol=0)


def test_folder_layouts(store: Store, tmp_path: Path) -> None:
    """Case 57: an adapter in the folder itself, others in subfolders, a trainer's checkpoint of both."""
    run = tmp_path / "run7"
    checkpoint = write(run / "checkpoint-120", 0)
    write(checkpoint / "reference", 1)
    (checkpoint / "optimizer.pt").write_bytes(b"not looked at")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 121, "epoch": 1.5}')
    versions = import_peft(store, checkpoint)
    assert {version.name: version.step for version in versions} == {"default": 121, "reference": 121}
    assert import_peft(store, write(run / "checkpoint-9", 2))[0].name == "run7"
    assert store.resolve("run7").step == 9
    with pytest.raises(UsageError, match="only checkpoint-120, checkpoint-9"):
        import_peft(store, run)
    write(run, 3)
    assert [version.name for version in import_peft(store, run)] == ["run7"], "the final adapter, not its checkpoints"
    assert import_peft(store, write(tmp_path / "one", 4), name="other/name")[0].name == "other/name"
    with pytest.raises(UsageError, match="holds 2 adapters"):
        import_peft(store, checkpoint, name="x")


def test_layouts_from_keys_alone() -> None:
    both = [CONFIG_FILE, MODEL]
    assert plan_import(both, "/x/a") == [FoundAdapter(name="a", folder="")]
    assert plan_import(both, "s3://bucket/runs/a") == [FoundAdapter(name="a", folder="")]
    assert plan_import(both, "s3://bucket") == [FoundAdapter(name="bucket", folder="")]
    deep = [f"team/a/{file}" for file in both] + [f"b/{file}" for file in both]
    assert plan_import(deep, "/x") == [FoundAdapter(name="b", folder="b"), FoundAdapter(name="team/a", folder="team/a")]
    with pytest.raises(UsageError, match="holds no PEFT adapter"):
        plan_import(["README.md"], "/x")
    with pytest.raises(UsageError, match="empty or not there"):
        plan_import([], "/x")
    with pytest.raises(NameNotAllowedError, match="'no', which is not allowed"):
        plan_import(both, "/x/no")


def test_a_folder_without_its_config_is_named(store: Store, tmp_path: Path) -> None:
    """Case 37: a file without config is invalid, and both files are named."""
    folder = write(tmp_path / "a", 0)
    (folder / CONFIG_FILE).unlink()
    for call in (lambda: read_peft_dir(folder), lambda: import_peft(store, folder)):
        with pytest.raises(DamagedError, match=r"has weights but no adapter_config\.json"):
            call()
    write(folder, 0)
    (folder / MODEL).unlink()
    for call in (lambda: read_peft_dir(folder), lambda: import_peft(store, folder)):
        with pytest.raises(DamagedError, match=f"no {MODEL}"):
            call()
    with pytest.raises(UsageError, match="not there"):
        read_peft_dir(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no PEFT adapter"):
        read_peft_dir(tmp_path)


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def test_pickles_only_by_request_and_never_their_code(store: Store, tmp_path: Path) -> None:
    """Cases 131, 132: a .bin is refused with a hint; allowed, it is loaded weights-only; a payload never runs."""
    folder, marker = write(tmp_path / "a", 0), tmp_path / "ran"
    (folder / MODEL).unlink()
    torch.save(tensors(0), folder / "adapter_model.bin")
    with pytest.raises(UsageError, match="pickle") as caught:
        import_peft(store, folder)
    assert "allow_pickle" in caught.value.remedy
    import_peft(store, folder, allow_pickle=True)
    assert same(store.get("a").tensors, tensors(0))
    for body in (pickle.dumps(Payload(marker)), pickle.dumps({"a": Payload(marker)}), b"", b"\x80\x04garbage"):
        (folder / "adapter_model.bin").write_bytes(body)
        with pytest.raises(DamagedError, match="weights-only"):
            import_peft(store, folder, allow_pickle=True)
    torch.save({"a": Payload(marker)}, folder / "adapter_model.bin")
    with pytest.raises(DamagedError, match="weights-only"):
        read_peft_dir(folder, allow_pickle=True)
    torch.save([1, 2], folder / "adapter_model.bin")
    with pytest.raises(DamagedError, match="not a mapping of tensors"):
        read_peft_dir(folder, allow_pickle=True)
    assert not marker.exists()
    (folder / MODEL).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(DamagedError, match="pickle"):
        import_peft(store, folder, allow_pickle=True)
    assert not marker.exists()
    assert store.names() == ["a"]


@pytest.mark.parametrize(("config", "tool"), [("p23_lerobot_not_peft", "LeRobot"), ("p24_mlx_lm", "mlx-lm")])
def test_files_of_other_tools_are_named(store: Store, shared: Path, tmp_path: Path, config: str, tool: str) -> None:
    folder = write(tmp_path / "a", 0)
    shutil.copy(shared / f"data/configs/{config}.json", folder / CONFIG_FILE)
    with pytest.raises(ConfigError, match="not a PEFT adapter") as caught:
        import_peft(store, folder)
    assert tool in str(caught.value)


def test_an_old_config_keeps_its_bytes(store: Store, shared: Path, tmp_path: Path, caplog: Any) -> None:
    folder = write(tmp_path / "a", 0)
    for name in ("p01_bloom_enable_lora_2023", "x00_loftq", "x07_bom"):
        shutil.copy(shared / f"data/configs/{name}.json", folder / CONFIG_FILE)
        version = import_peft(store, folder, allow_rank_mismatch=True)[0]  # the weights are not theirs
        assert (store.path(version) / CONFIG_FILE).read_bytes() == (folder / CONFIG_FILE).read_bytes()
    assert "older PEFT" in caplog.text


def test_wrapper_prefixes_are_taken_off(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 0)
    wrapped = {
        name.replace("layers.0.", "layers.0._fsdp_wrapped_module.").replace("layers.1.", "layers.1._orig_mod."): tensor
        for name, tensor in tensors(0).items()
    }
    (folder / MODEL).write_bytes(b"".join(bytes(part) for part in encode(wrapped).parts))
    import_peft(store, folder)
    assert same(store.get("a").tensors, tensors(0))
    doubled = {**tensors(0), **wrapped}
    (folder / MODEL).write_bytes(b"".join(bytes(part) for part in encode(doubled).parts))
    with pytest.raises(DamagedError, match="two tensors"):
        import_peft(store, folder)


def test_one_bad_adapter_imports_none(store: Store, tmp_path: Path) -> None:
    write(tmp_path / "all/a", 0)
    write(tmp_path / "all/b", 1)
    (tmp_path / "all/b" / MODEL).write_bytes(b"truncated")
    with pytest.raises(DamagedError):
        import_peft(store, tmp_path / "all")
    assert not (tmp_path / "store").exists()


def test_linked_files_of_a_hub_cache_are_followed(store: Store, tmp_path: Path) -> None:
    blobs = write(tmp_path / "blobs", 0)
    (tmp_path / "snapshot").mkdir()
    for file in (MODEL, CONFIG_FILE):
        (tmp_path / "snapshot" / file).symlink_to(blobs / file)
    assert same(read_peft_dir(tmp_path / "snapshot").tensors, tensors(0))


def test_an_export_overwrites_only_when_asked(store: Store, tmp_path: Path) -> None:
    store.put("a", tensors(0), CONFIG)
    store.put("b", tensors(1), CONFIG)
    export_adapter(store, "a", tmp_path / "out")
    export_adapter(store, "a", tmp_path / "out")
    with pytest.raises(ExistsError, match="another adapter"):
        export_adapter(store, "b", tmp_path / "out")
    assert same(read_peft_dir(tmp_path / "out").tensors, tensors(0))
    export_adapter(store, "b", tmp_path / "out", overwrite=True)
    assert same(read_peft_dir(tmp_path / "out").tensors, tensors(1))


def test_the_order_of_patterns_is_kept_in_what_they_say(tmp_path: Path) -> None:
    """Two adapters that differ in nothing else are two versions, each with its own scales after a round trip."""
    made = tensors(1)
    path = next(name for name in made).removeprefix("base_model.model.").partition(".lora_")[0]
    last = path.rpartition(".")[2]
    store, seen = open_store(tmp_path / "store"), {}
    for name, patterns in {"p": {last: 8, path: 800}, "q": {path: 800, last: 8}}.items():
        folder = tmp_path / "folders" / name
        folder.mkdir(parents=True)
        save_file(made, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "alpha_pattern": patterns}))
        seen[name] = AdapterConfig.parse({**CONFIG, "alpha_pattern": patterns}).scaling_for(path)
    first = import_peft(store, tmp_path / "folders")
    assert len({version.id for version in first}) == 2
    for name in seen:
        assert store.get(name).config.scaling_for(path) == seen[name]
        back = export_adapter(store, name, tmp_path / "out" / name)
        assert json.loads((Path(back) / "adapter_config.json").read_bytes())["alpha_pattern"]
    assert [v.id for v in import_peft(store, tmp_path / "folders")] == [v.id for v in first]
    assert [v.id for v in import_peft(store, tmp_path / "out")] == [v.id for v in first]
    assert sync(tmp_path / "folders", store).unchanged
