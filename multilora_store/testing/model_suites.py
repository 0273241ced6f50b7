"""Suites for plugins that build or look at models: subclass one and give `plugin` as a fixture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from multilora_store.errors import MultiLoRAError
from multilora_store.plugins import Plugin
from multilora_store.testing.adapters import lora_adapter
from multilora_store.testing.suites import PluginSuite

if TYPE_CHECKING:
    import torch
    from torch import nn

    from multilora_store.storage import Store

__all__ = ["AssemblerSuite", "AssemblyStepSuite", "AuditCheckSuite", "BaseProviderSuite"]


class _AssemblingSuite(PluginSuite):
    """What an assembly keeps, whichever part of it a plugin replaces."""

    @pytest.fixture
    def filled(self, store: Store) -> Store:
        """A store with the adapters `a` and `b` for a tiny decoder, and `broken`, whose shapes fit no layer of it."""
        for seed, name in enumerate(("a", "b")):
            config, tensors = lora_adapter("tiny", seed=seed, r=2 + 2 * seed)
            store.put(name, tensors, config)
        config, tensors = lora_adapter("tiny", seed=2)
        store.put("broken", {name: tensor.repeat(1, 2) for name, tensor in tensors.items()}, config)
        return store

    def build(self, plugin: Plugin, base: nn.Module, names: tuple[str, ...], store: Store, params: Any) -> nn.Module:
        """Assemble the adapters on the base through the plugin."""
        raise NotImplementedError

    def test_it_builds_a_model_that_computes_the_same_each_time(
        self, plugin: Plugin, filled: Store, params: dict[str, Any]
    ) -> None:
        import torch

        from multilora_store.testing.models import tiny_decoder

        outputs = []
        for _ in range(2):
            base = tiny_decoder()
            model = self.build(plugin, base, ("a", "b"), filled, params).eval()
            with torch.no_grad():
                outputs.append(model(base.example()))
        assert bool(outputs[0].isfinite().all())
        assert torch.equal(outputs[0], outputs[1])

    def test_the_base_keeps_its_weights(self, plugin: Plugin, filled: Store, params: dict[str, Any]) -> None:
        import torch

        from multilora_store.testing.models import tiny_decoder

        base = tiny_decoder()
        before = {id(parameter): parameter.detach().clone() for parameter in base.parameters()}
        model = self.build(plugin, base, ("a", "b"), filled, params)
        kept = [parameter for parameter in model.parameters() if id(parameter) in before]
        assert len(kept) == len(before)
        assert all(torch.equal(parameter, before[id(parameter)]) for parameter in kept)

    def test_a_broken_adapter_leaves_the_base_as_it_was(
        self, plugin: Plugin, filled: Store, params: dict[str, Any]
    ) -> None:
        from multilora_store.testing.models import tiny_decoder

        base = tiny_decoder()
        before = [name for name, _ in base.named_parameters()]
        with pytest.raises(MultiLoRAError):
            self.build(plugin, base, ("a", "broken"), filled, params)
        assert [name for name, _ in base.named_parameters()] == before


class AssemblerSuite(_AssemblingSuite):
    """An assembler: `assembler(work, steps, **params) -> PeftModel`."""

    kind = "assembler"

    def build(self, plugin: Plugin, base: nn.Module, names: tuple[str, ...], store: Store, params: Any) -> nn.Module:
        """Assemble with the plugin as the assembler."""
        from multilora_store.assembly import assemble

        chosen = partial(plugin.load(), **params)
        model: nn.Module = assemble(base, {name: name for name in names}, store=store, assembler=chosen)
        return model


class AssemblyStepSuite(_AssemblingSuite):
    """An assembly step: `step(work, **params)`, at the place `place` (`load`, `after:load`, ...)."""

    kind = "assembly_step"
    place: ClassVar[str]

    def build(self, plugin: Plugin, base: nn.Module, names: tuple[str, ...], store: Store, params: Any) -> nn.Module:
        """Assemble with the plugin as the step at its place."""
        from multilora_store.assembly import assemble

        steps = {self.place: partial(plugin.load(), **params)}
        model: nn.Module = assemble(base, {name: name for name in names}, store=store, steps=steps)
        return model


class BaseProviderSuite(PluginSuite):
    """A base provider: `provider(**params) -> nn.Module`, the same each time, whatever the global seed."""

    kind = "base_provider"

    def test_its_required_parameters_are_given_here(self, plugin: Plugin, params: dict[str, Any]) -> None:
        required = {item.name for item in plugin.parameters if item.default is item.REQUIRED}
        assert required <= set(params), "a provider may take more parameters than it names"

    def test_the_same_parameters_give_the_same_base(self, plugin: Plugin, params: dict[str, Any]) -> None:
        import torch

        built = []
        for seed in (1, 2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                built.append(plugin.load()(**params).state_dict())
        assert built[0].keys() == built[1].keys()
        assert built[0]
        assert all(torch.equal(built[0][name], built[1][name]) for name in built[0])


class AuditCheckSuite(PluginSuite):
    """An audit check: `check(model, **params)` yields findings of `multilora_store.distributed` and changes nothing."""

    kind = "audit_check"

    @pytest.fixture
    def healthy(self) -> nn.Module:
        """A model in which it finds nothing."""
        from multilora_store.assembly import assemble
        from multilora_store.testing.models import tiny_decoder

        fields = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
        model: nn.Module = assemble(tiny_decoder(), {"a": {"if_missing": "init", "config": fields}})
        return model

    @pytest.fixture
    def faulty(self) -> nn.Module:
        """A model in which it finds something."""
        raise NotImplementedError("give a model with the fault that the check looks for")

    def test_a_healthy_model_has_no_findings(self, plugin: Plugin, healthy: nn.Module, params: dict[str, Any]) -> None:
        assert list(plugin.load()(healthy, **params)) == []

    def test_a_fault_is_found_and_named(self, plugin: Plugin, faulty: nn.Module, params: dict[str, Any]) -> None:
        findings = list(plugin.load()(faulty, **params))
        assert findings
        assert all(str(finding) for finding in findings)

    def test_looking_changes_nothing(self, plugin: Plugin, faulty: nn.Module, params: dict[str, Any]) -> None:
        import torch

        before, flags = _state(faulty)
        list(plugin.load()(faulty, **params))
        after, flags_after = _state(faulty)
        assert before.keys() == after.keys()
        assert flags == flags_after
        assert all(torch.equal(before[name], after[name]) for name in before)


def _state(model: nn.Module) -> tuple[Mapping[str, torch.Tensor], tuple[Any, ...]]:
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    flags = tuple((name, parameter.requires_grad, parameter.device) for name, parameter in model.named_parameters())
    return values, (*flags, model.training)
