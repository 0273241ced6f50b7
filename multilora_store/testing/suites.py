"""Suites for plugins that need no model: subclass one, give `plugin` as a fixture, and pytest does the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from multilora_store.errors import ExistsError, MultiLoRAError, UsageError
from multilora_store.plugins import Plugin
from multilora_store.testing.adapters import lora_adapter

if TYPE_CHECKING:
    import torch

    from multilora_store.merging import MergeSource
    from multilora_store.storage import Store
    from multilora_store.storage.retention import Candidate

__all__ = [
    "ExporterSuite",
    "MergeStrategySuite",
    "PluginSuite",
    "RetentionPolicySuite",
    "SourceSuite",
    "declared",
]


def declared(target: Callable[..., Any]) -> Plugin:
    """The plugin that a decorated function or class declares, as the door would.

    Raises:
        UsageError: it is not decorated with `@plugin(kind)`.
    """
    mark = getattr(target, "__multilora_plugin__", None)
    if mark is None:
        raise UsageError(f"{target!r} declares no plugin", remedy="decorate it with @plugin(kind)")
    return Plugin(kind=mark[0], name=mark[1], target=target, origin=target.__module__)


class PluginSuite:
    """What every plugin keeps. Subclasses give `plugin` as a fixture, and `params` where parameters are required."""

    kind: ClassVar[str]

    @pytest.fixture
    def plugin(self) -> Plugin:
        """The plugin under test."""
        raise NotImplementedError("give the plugin as a fixture: return declared(function)")

    @pytest.fixture
    def params(self) -> dict[str, Any]:
        """The parameters that it is called with."""
        return {}

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        """An empty store on the disk, with a cache of this test's own."""
        from multilora_store.storage import open_store

        monkeypatch.setenv("MULTILORA_CACHE", str(tmp_path / "cache"))
        return open_store(tmp_path / "store")

    def test_it_is_of_this_kind_and_says_what_it_does(self, plugin: Plugin) -> None:
        assert plugin.kind == self.kind
        assert plugin.description, f"{plugin.name} has no docstring, so that --help has nothing to say"

    def test_its_parameters_are_typed(self, plugin: Plugin) -> None:
        untyped = [item.name for item in plugin.parameters if item.annotation == "Any"]
        assert not untyped, f"the parameters {untyped} of {plugin.name} have no type, so that values are not checked"

    def test_its_required_parameters_are_given_here(self, plugin: Plugin, params: dict[str, Any]) -> None:
        required = {item.name for item in plugin.parameters if item.default is item.REQUIRED}
        assert required <= set(params)
        assert set(params) <= {item.name for item in plugin.parameters}


class MergeStrategySuite(PluginSuite):
    """A merge strategy: finite, a function of its inputs, and it leaves them alone."""

    kind = "merge_strategy"

    @pytest.fixture
    def adapters(self) -> list[MergeSource]:
        """The adapters to merge."""
        from multilora_store.merging import MergeSource

        return [MergeSource.in_memory(f"a{seed}", *lora_adapter("tiny", seed=seed, layers=1)) for seed in range(2)]

    def merged(
        self, plugin: Plugin, adapters: list[MergeSource], params: dict[str, Any], **options: Any
    ) -> Mapping[str, torch.Tensor]:
        """The tensors of one merge."""
        from multilora_store.merging import Strategy, merge_adapters

        strategy = Strategy.from_plugin(plugin)
        weights = [1.0 / len(adapters)] * len(adapters)
        return merge_adapters(adapters, weights, strategy=strategy, **params, **options).tensors

    def test_the_result_is_an_adapter_of_finite_values(
        self, plugin: Plugin, adapters: list[MergeSource], params: dict[str, Any]
    ) -> None:
        found = self.merged(plugin, adapters, params)
        assert set(found) == set(adapters[0].tensors)
        assert all(bool(tensor.isfinite().all()) and tensor.numel() for tensor in found.values())

    def test_equal_inputs_give_equal_bytes_in_any_order_and_on_any_threads(
        self, plugin: Plugin, adapters: list[MergeSource], params: dict[str, Any]
    ) -> None:
        import torch

        first = self.merged(plugin, adapters, params, threads=1)
        second = self.merged(plugin, adapters[::-1], params, threads=2)
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_the_adapters_are_left_as_they_are(
        self, plugin: Plugin, adapters: list[MergeSource], params: dict[str, Any]
    ) -> None:
        import torch

        before = [{name: tensor.clone() for name, tensor in source.tensors.items()} for source in adapters]
        self.merged(plugin, adapters, params)
        for copy, source in zip(before, adapters, strict=True):
            assert all(torch.equal(copy[name], tensor) for name, tensor in source.tensors.items())

    def test_an_unknown_parameter_is_refused(
        self, plugin: Plugin, adapters: list[MergeSource], params: dict[str, Any]
    ) -> None:
        with pytest.raises(MultiLoRAError, match="no_such_parameter"):
            self.merged(plugin, adapters, {**params, "no_such_parameter": 1})


class SourceSuite(PluginSuite):
    """A source: it reads the deltas that are there, and fails with a typed error where it cannot."""

    kind = "source"

    @pytest.fixture
    def example(self, tmp_path: Path) -> tuple[str, Mapping[str, torch.Tensor]]:
        """A location, and the weight delta (rows, columns) of every module that lies there."""
        raise NotImplementedError("write a small file in that layout, and say which deltas it holds")

    def test_the_deltas_are_those_of_the_file(
        self, plugin: Plugin, example: tuple[str, Mapping[str, torch.Tensor]], params: dict[str, Any]
    ) -> None:
        import torch

        location, deltas = example
        found = plugin.load()(location, **params)
        seen = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in found.tensors}
        assert seen == set(deltas)
        for path, delta in deltas.items():
            down, up = (found.tensors[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
            assert torch.allclose(found.config.scaling_for(path) * up @ down, delta, rtol=1e-4, atol=1e-5), path

    def test_a_store_takes_it_and_reading_again_gives_the_same(
        self,
        plugin: Plugin,
        example: tuple[str, Mapping[str, torch.Tensor]],
        params: dict[str, Any],
        store: Store,
    ) -> None:
        put = [
            store.put(name, found.tensors, found.config)
            for name in ("first", "second")
            if (found := plugin.load()(example[0], **params))
        ]
        assert put[0].digest == put[1].digest

    def test_what_is_not_there_is_a_typed_error(self, plugin: Plugin, params: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(MultiLoRAError):
            plugin.load()(str(tmp_path / "nothing" / "here.safetensors"), **params)

    def test_a_truncated_file_is_a_typed_error(
        self, plugin: Plugin, example: tuple[str, Mapping[str, torch.Tensor]], params: dict[str, Any], tmp_path: Path
    ) -> None:
        files = sorted(path for path in tmp_path.rglob("*.*") if path.is_file() and path.suffix != ".json")
        assert files, "the example writes its file below tmp_path, so that it can be damaged here"
        for file in files:
            file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(MultiLoRAError):
            [tensor.sum() for tensor in plugin.load()(example[0], **params).tensors.values()]


class ExporterSuite(PluginSuite):
    """An exporter: files that are a function of the version, never over another's, and the store is not touched."""

    kind = "exporter"

    @pytest.fixture
    def filled(self, store: Store) -> Store:
        """A store with the adapters `a` and `b`."""
        for seed, name in enumerate(("a", "b")):
            config, tensors = lora_adapter("tiny", seed=seed)
            store.put(name, tensors, config)
        return store

    def test_equal_versions_give_equal_files(
        self, plugin: Plugin, filled: Store, params: dict[str, Any], tmp_path: Path
    ) -> None:
        before = filled.state().seq
        contents = []
        for target in (tmp_path / "one", tmp_path / "two"):
            place = plugin.load()(filled, "a", target, **params)
            assert Path(str(place)).exists()
            contents.append(_files(target))
        assert contents[0]
        assert contents[0] == contents[1]
        assert filled.state().seq == before

    def test_another_adapter_is_not_overwritten(
        self, plugin: Plugin, filled: Store, params: dict[str, Any], tmp_path: Path
    ) -> None:
        plugin.load()(filled, "a", tmp_path / "out", **params)
        before = _files(tmp_path / "out")
        with suppress(ExistsError):
            plugin.load()(filled, "b", tmp_path / "out", **params)
        after = _files(tmp_path / "out")
        assert {name: after.get(name) for name in before} == before

    def test_an_unknown_reference_writes_nothing(
        self, plugin: Plugin, filled: Store, params: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(MultiLoRAError):
            plugin.load()(filled, "nobody", tmp_path / "out", **params)
        assert _files(tmp_path / "out") == {}


class RetentionPolicySuite(PluginSuite):
    """A retention policy: it keeps some of what it is asked about, the same each time, and nothing of nothing."""

    kind = "retention_policy"

    @pytest.fixture
    def candidates(self) -> list[Candidate]:
        """Versions, oldest first."""
        from multilora_store.storage.retention import Candidate

        start = datetime(2026, 1, 1, tzinfo=UTC)
        return [
            Candidate(
                kind="version",
                id=f"v{number:016x}",
                name="a",
                seq=number,
                time=start + timedelta(hours=number),
                step=100 * number,
                metadata={"loss": 1.0 / (number + 1)},
                tags=("best",) if number == 3 else (),
            )
            for number in range(12)
        ]

    def test_it_keeps_some_of_what_it_is_asked_about(
        self, plugin: Plugin, candidates: list[Candidate], params: dict[str, Any]
    ) -> None:
        kept = [item.id for item in plugin.load()(candidates, **params)]
        assert set(kept) <= {item.id for item in candidates}
        assert kept, (
            "a policy that keeps nothing of twelve versions is of no use: give params under which it keeps some"
        )
        assert kept == [item.id for item in plugin.load()(list(candidates), **params)]

    def test_nothing_is_kept_of_nothing(self, plugin: Plugin, params: dict[str, Any]) -> None:
        assert list(plugin.load()([], **params)) == []


def _files(folder: Path) -> dict[str, str]:
    """Relative path -> digest of every file below the folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
