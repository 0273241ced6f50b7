"""The suites that plugin authors get: our own plugins pass them, and a plugin that breaks its word fails them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import multilora_store
from multilora_store.adapter import AdapterConfig
from multilora_store.assembly import assemble
from multilora_store.assembly.bridge import adapter_parameters
from multilora_store.errors import (
    AuditError,
    DamagedError,
    StorageUnreachableError,
    UnsupportedError,
    UsageError,
)
from multilora_store.plugins import Plugin, default_registry, plugin
from multilora_store.storage import Store, open_store
from multilora_store.storage.local import LocalBlobs
from multilora_store.testing import (
    SHAPES,
    AssemblerSuite,
    AssemblyStepSuite,
    AuditCheckSuite,
    BaseProviderSuite,
    BlobsSuite,
    ExporterSuite,
    FaultyBlobs,
    Guard,
    MergeStrategySuite,
    PluginSuite,
    RetentionPolicySuite,
    SourceSuite,
    declared,
    lora_adapter,
    tiny_decoder,
    tiny_mixture,
)

REGISTRY = default_registry()
ENVIRONMENT = {
    "PYTHONPATH": str(Path(multilora_store.__file__).parents[1]),
    "PATH": "/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
}


def builtins(kind: str) -> list[str]:
    return [item.name for item in REGISTRY.all() if item.kind == kind and item.origin == "built-in"]


# Our own plugins, through the suites.


@pytest.mark.parametrize("name", builtins("merge_strategy"), scope="class")
class TestMergeStrategies(MergeStrategySuite):
    @pytest.fixture
    def plugin(self, name: str) -> Plugin:
        return REGISTRY.get("merge_strategy", name)

    @pytest.fixture
    def params(self, plugin: Plugin) -> dict[str, Any]:
        return {item.name: 0.5 for item in plugin.parameters if item.default is item.REQUIRED}


@pytest.mark.parametrize("name", builtins("assembler"), scope="class")
class TestAssemblers(AssemblerSuite):
    @pytest.fixture
    def plugin(self, name: str) -> Plugin:
        return REGISTRY.get("assembler", name)


@pytest.mark.parametrize("name", ["resolve", "read", "check", "inject", "cover", "load", "activate"], scope="class")
class TestAssemblySteps(AssemblyStepSuite):
    @pytest.fixture(autouse=True)
    def _at_its_own_place(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "place", name, raising=False)

    @pytest.fixture
    def plugin(self, name: str) -> Plugin:
        return REGISTRY.get("assembly_step", name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", builtins("base_provider"), scope="class")
class TestBaseProviders(BaseProviderSuite):
    @pytest.fixture
    def plugin(self, name: str) -> Plugin:
        return REGISTRY.get("base_provider", name)

    @pytest.fixture
    def params(self, name: str, request: pytest.FixtureRequest) -> dict[str, Any]:
        if name == "hf":
            return {"path": str(request.getfixturevalue("llama"))}
        return {"target": "multilora_store.testing.models:tiny_decoder"} if name == "python" else {}


PATH = "model.layers.0.self_attn.q_proj"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def gguf_file(file: Path, down: torch.Tensor, up: torch.Tensor) -> str:
    """As llama.cpp's converter writes it."""
    import gguf

    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 6.0)
    for side, tensor in (("a", down), ("b", up)):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{side}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


def layouts(folder: Path) -> Mapping[str, tuple[str, torch.Tensor]]:
    """By source, a file in its layout below the folder, and the one delta that it holds."""
    up, down = torch.randn(8, 2), torch.randn(2, 5)  # no padding at the end of a GGUF file
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    flat = PATH.replace(".", "_")
    files: dict[str, tuple[str, dict[str, torch.Tensor], dict[str, Any]]] = {
        "peft": (
            "adapter_model.safetensors",
            {f"base_model.model.{PATH}.lora_A.weight": down, f"base_model.model.{PATH}.lora_B.weight": up},
            config,
        ),
        "peft_legacy": (
            "adapter_model.safetensors",
            {f"{PATH}.lora_A.x.weight": down, f"{PATH}.lora_B.x.weight": up},
            config,
        ),
        "kohya": (
            "style.safetensors",
            {
                f"lora_te_{flat}.lora_down.weight": down,
                f"lora_te_{flat}.lora_up.weight": up,
                f"lora_te_{flat}.alpha": torch.tensor(6.0),
            },
            {},
        ),
        "diffusers": (
            "pytorch_lora_weights.safetensors",
            {
                f"text_encoder.{PATH}.lora.down.weight": down,
                f"text_encoder.{PATH}.lora.up.weight": up,
                f"text_encoder.{PATH}.alpha": torch.tensor(6.0),
            },
            {},
        ),
        "mlx": (
            "adapters.safetensors",
            {f"{PATH}.lora_a": down.T.contiguous(), f"{PATH}.lora_b": up.T.contiguous()},
            {"lora_parameters": {"scale": 3.0}},
        ),
    }
    files["unsloth"], files["hf"] = files["peft_legacy"], files["peft"]
    made = {"gguf": (gguf_file(folder / "style.gguf", down, up), 3.0 * up @ down)}
    for source, (file, tensors, beside) in files.items():
        place = folder / source
        if source == "hf":  # the hub's cache, read offline
            place = folder / "hub" / "models--org--repo" / "snapshots" / COMMIT
        place.mkdir(parents=True)
        save_file(tensors, str(place / file))
        if beside:
            (place / "adapter_config.json").write_text(json.dumps(beside))
        made[source] = f"org/repo@{COMMIT}" if source == "hf" else str(place), 3.0 * up @ down
    return made


@pytest.mark.parametrize("name", builtins("source"), scope="class")
class TestSources(SourceSuite):
    @pytest.fixture
    def plugin(self, name: str) -> Plugin:
        return REGISTRY.get("source", name)

    @pytest.fixture
    def example(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[str, Mapping[str, torch.Tensor]]:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "files" / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        location, delta = layouts(tmp_path / "files")[name]
        return location, {PATH: delta}


@pytest.mark.parametrize("name", builtins("exporter"), scope="class")
class TestExporters(ExporterSuite):
    @pytest.fixture
    def plugin(self, name: str) -> Plugin:
        return REGISTRY.get("exporter", name)


POLICIES: dict[str, dict[str, Any]] = {
    "keep_best": {"metric": "loss"},
    "keep_every": {"steps": 300},
    "keep_last": {"count": 3},
    "keep_tagged": {},
}


@pytest.mark.parametrize("name", sorted(set(POLICIES) & set(builtins("retention_policy"))), scope="class")
class TestRetentionPolicies(RetentionPolicySuite):
    @pytest.fixture
    def plugin(self, name: str) -> Plugin:
        return REGISTRY.get("retention_policy", name)

    @pytest.fixture
    def params(self, name: str) -> dict[str, Any]:
        return POLICIES[name]


@plugin("audit_check")
def frozen_base(model: nn.Module, *, marker: str = "lora_") -> Iterator[str]:
    """Parameters of the base that would be trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and marker not in name:
            yield f"{name} is trainable"


class TestAuditCheck(AuditCheckSuite):
    @pytest.fixture
    def plugin(self) -> Plugin:
        return declared(frozen_base)

    @pytest.fixture
    def faulty(self, healthy: nn.Module) -> nn.Module:
        next(parameter for name, parameter in healthy.named_parameters() if "lora_" not in name).requires_grad_(True)
        return healthy


class TestFaultyBlobsThatDoNotFail(BlobsSuite):
    """Without a fault, or only late, a faulty storage is a storage."""

    @pytest.fixture(params=["none", "delay"])
    def blobs(self, tmp_path: Path, request: pytest.FixtureRequest) -> FaultyBlobs:
        inner = LocalBlobs(tmp_path / "root")
        return FaultyBlobs(inner) if request.param == "none" else FaultyBlobs(inner, 1, "delay", delay=0.001)


# The suites find what is wrong.


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints in another project, with plugins that break their word and a test with our fixtures."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "test_bad.py").write_text(BAD, encoding="utf-8")
    (folder / "test_mine.py").write_text(MINE, encoding="utf-8")
    installed = any(point.name == "multilora_store" for point in entry_points(group="pytest11"))
    asked = [] if installed else ["-p", "multilora_store.testing.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEp", *asked]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )
    return done.stdout + done.stderr


def test_a_suite_fails_a_plugin_that_breaks_its_word(elsewhere: str) -> None:
    """Each named test fails, and no other."""
    lines = [line for line in elsewhere.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert {line.split("::", 1)[1].split(" ", 1)[0] for line in lines} == {
        "TestUntyped::test_its_parameters_are_typed",
        "TestUntyped::test_it_is_of_this_kind_and_says_what_it_does",
        "TestRandom::test_equal_inputs_give_equal_bytes_in_any_order_and_on_any_threads",
        "TestGreedy::test_it_keeps_some_of_what_it_is_asked_about",
        "TestGreedy::test_nothing_is_kept_of_nothing",
        "TestOverwriting::test_another_adapter_is_not_overwritten",
        "TestUnscaled::test_the_deltas_are_those_of_the_file",
    }, elsewhere[-3000:]


def test_the_pytest_plugin_gives_both_fixtures(elsewhere: str) -> None:
    assert "PASSED test_mine.py::test_store" in elsewhere, elsewhere[-3000:]


MINE = """
def test_store(multilora_store, multilora_guard):
    from multilora_store.testing import lora_adapter
    config, tensors = lora_adapter("tiny")
    multilora_store.put("a", tensors, config)
    multilora_guard.store(multilora_store, profile="vllm")
"""

BAD = '''
import secrets
from dataclasses import replace

import pytest

from multilora_store.plugins import plugin
from multilora_store.storage.dialects import read_peft
from multilora_store.storage.exporters import export_peft
from multilora_store.testing import (
    ExporterSuite, MergeStrategySuite, RetentionPolicySuite, SourceSuite, declared, lora_adapter,
)


@plugin("merge_strategy")
def untyped(deltas, weights, *, share=0.5):
    return type(deltas[0]).total(deltas, weights)


@plugin("merge_strategy")
def random(deltas, weights):
    """Another result each time."""
    return type(deltas[0]).total(deltas, [weight * (1 + secrets.randbelow(99)) for weight in weights])


@plugin("retention_policy")
def greedy(candidates):
    """Keeps what it was never asked about."""
    from datetime import UTC, datetime

    from multilora_store.storage.retention import Candidate
    return [Candidate(kind="version", id="v0", seq=0, time=datetime.now(UTC))]


@plugin("exporter")
def overwriting(store, ref, target):
    """Writes over what is there."""
    return export_peft(store, ref, target, overwrite=True)


@plugin("source")
def unscaled(location):
    """Loses the scale."""
    found = read_peft(location)
    return replace(found, config=found.config.replace(lora_alpha=1), files={})


def suite(base, function):
    return type(base.__name__, (base,), {"plugin": pytest.fixture(lambda self: declared(function))})


class TestUntyped(suite(MergeStrategySuite, untyped)): pass
class TestRandom(suite(MergeStrategySuite, random)): pass
class TestGreedy(suite(RetentionPolicySuite, greedy)): pass
class TestOverwriting(suite(ExporterSuite, overwriting)): pass


class TestUnscaled(suite(SourceSuite, unscaled)):
    @pytest.fixture
    def example(self, tmp_path):
        from multilora_store.storage import open_store
        config, tensors = lora_adapter("tiny", layers=1, targets=("q_proj",))
        place = export_peft_of(open_store(tmp_path / "other"), config, tensors, tmp_path / "folder")
        path = "model.layers.0.self_attn.q_proj"
        down, up = (tensors[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
        return place, {path: config.scaling_for(path) * up @ down}


def export_peft_of(store, config, tensors, target):
    store.put("a", tensors, config)
    return str(export_peft(store, "a", target))
'''


def test_a_suite_without_a_plugin_says_what_to_give() -> None:
    with pytest.raises(UsageError, match="decorate it"):
        declared(lambda: None)
    assert PluginSuite.__doc__ is not None
    assert "fixture" in PluginSuite.__doc__


# The faulty storage.


@pytest.mark.parametrize(("fault", "left"), [("fail", None), ("truncate", b"12"), ("lose the answer", b"1234")])
def test_a_write_goes_wrong_in_the_way_asked_for(tmp_path: Path, fault: Any, left: bytes | None) -> None:
    inner = LocalBlobs(tmp_path / "root")
    faulty = FaultyBlobs(inner, 1, fault)
    faulty.write("a", b"before")
    with pytest.raises(StorageUnreachableError, match="call 1"):
        faulty.write("b", b"1234")
    assert inner.read("b") == left
    assert faulty.read("a") == b"before"
    assert faulty.calls == ["write a", "write b", "read a"]


@pytest.mark.parametrize(("fault", "left"), [("fail", 4), ("truncate", 2), ("lose the answer", 0)])
def test_a_delete_may_be_half_done(tmp_path: Path, fault: Any, left: int) -> None:
    inner = LocalBlobs(tmp_path / "root")
    for key in "abcd":
        inner.write(key, b"x")
    with pytest.raises(StorageUnreachableError):
        FaultyBlobs(inner, 0, fault).delete("abcd")
    assert len(list(inner.list())) == left


def test_every_later_call_fails_where_the_process_is_gone(tmp_path: Path) -> None:
    faulty = FaultyBlobs(LocalBlobs(tmp_path / "root"), 1, repeat=True)
    faulty.write("a", b"x")
    for call in (faulty.read, faulty.stat, lambda key: faulty.create(key, b""), faulty.list):
        with pytest.raises(StorageUnreachableError):
            call("a")


# Models and adapters.


def test_an_adapter_of_the_tiny_shape_fits_the_tiny_decoder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", cache=False)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    config, tensors = lora_adapter("tiny", targets=targets)
    store.put("a", tensors, config)
    base = tiny_decoder()
    plain = base(base.example())
    model = assemble(base, {"a": "a"}, store=store)
    assert not torch.allclose(model(base.example()), plain)


def test_values_depend_on_seed_and_name_alone() -> None:
    _, one = lora_adapter("tiny", seed=1)
    _, more = lora_adapter("tiny", seed=1, targets=("q_proj", "o_proj"))
    _, other = lora_adapter("tiny", seed=2)
    shared = set(one) & set(more)
    assert shared
    assert all(torch.equal(one[name], more[name]) for name in shared)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    before = torch.random.get_rng_state()
    assert torch.equal(tiny_decoder(seed=3).lm_head.weight, tiny_decoder(seed=3).lm_head.weight)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tiny_mixture()(tiny_mixture().example()).shape == (2, 6, 32)


def test_real_shapes_are_those_of_real_files(shared: Path) -> None:
    from multilora_store.storage import read_peft_dir

    real = read_peft_dir(shared / "data/adapters/code_style")
    config, tensors = lora_adapter("smollm2-135m", r=8)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in real.tensors.items()
    }
    assert config.base_model == real.config.base_model


def test_a_few_layers_of_a_large_shape_cost_little() -> None:
    config, tensors = lora_adapter("llama-3.1-70b", r=1, layers=1, targets=("k_proj",), dtype="bfloat16")
    assert [tuple(tensor.shape) for tensor in tensors.values()] == [(1, 8192), (1024, 1)]
    assert config.raw["layers_to_transform"] == [0]
    assert set(SHAPES) >= {"tiny", "smollm2-135m", "llama-3.1-8b"}
    with pytest.raises(UsageError, match="did you mean llama"):
        lora_adapter("llama-3.1-8")
    with pytest.raises(UsageError, match="did you mean q_proj"):
        lora_adapter("tiny", targets=("q_prj",))


# Guards.


@pytest.fixture
def model() -> nn.Module:
    fields = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    entry = {"if_missing": "init", "config": fields}
    return assemble(tiny_decoder(), {"a": {**entry, "trainable": True}, "b": entry})


def test_the_guard_lets_one_adapter_change_and_names_every_other(model: nn.Module) -> None:
    guard = Guard()
    mine, other = (next(iter(adapter_parameters(model, name).values())) for name in "ab")
    with guard.only(model, "a"), torch.no_grad():
        mine.add_(1.0)
    with pytest.raises(AuditError, match="1 tensors changed") as caught, guard.only(model, "a"), torch.no_grad():
        other.add_(1.0)
    assert ".lora_" in caught.value.facts["tensors"][0]


def test_the_guard_audits_a_model(model: nn.Module) -> None:
    guard = Guard()
    guard(model)
    frozen = next(iter(adapter_parameters(model, "b").values()))
    frozen.grad = torch.ones_like(frozen)
    with pytest.raises(AuditError, match="still has a gradient"):
        guard(model)


def test_the_guard_verifies_a_store_and_its_servability(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", cache=False)
    config, tensors = lora_adapter("tiny")
    version = store.put("a", tensors, config)
    guard = Guard()
    guard.store(store, profile="vllm")
    store.put("b", tensors, AdapterConfig.parse({**config.raw, "bias": "all"}))
    guard.store(store)
    guard.store(store, "a", profile="vllm")
    with pytest.raises(UnsupportedError, match="vllm would not serve"):
        guard.store(store, profile="vllm")
    path = tmp_path / "store" / version.directory / "adapter_model.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="faults"):
        guard.store(store, "a")


def test_importing_the_package_is_light() -> None:
    check = (
        "import multilora_store.testing, multilora_store.testing.pytest_plugin, sys;"
        "print([m for m in ('torch', 'peft', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_store_type_is_public() -> None:
    assert multilora_store.Store is Store
