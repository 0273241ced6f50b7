"""Merging adapters in memory, or behind lazy tensors, module by module."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
from torch import Tensor

import multilora_store
from multilora_store.adapter import AdapterConfig
from multilora_store.errors import MergeError, choices
from multilora_store.merging.blocks import Workspace, settle_heap
from multilora_store.merging.capability import check_configs, check_layouts
from multilora_store.merging.full_modules import merge_full, owners_of, resolve_rule
from multilora_store.merging.merged_config import merged_config
from multilora_store.merging.module_merge import ModuleResult, Settings, Truncation, merge_module
from multilora_store.merging.plan import ModulePlan, check_weights, plan_modules
from multilora_store.merging.readback import check_scales
from multilora_store.merging.report import MergeReport
from multilora_store.merging.source import DTYPES, MergeSource, canonical_order
from multilora_store.merging.strategy import Strategy
from multilora_store.plugins import Registry, default_registry
from multilora_store.storage.progress import Listener, Meter

__all__ = ["BUDGET", "Merged", "merge_adapters"]

BUDGET: Final = 512 * 2**20
"""Bytes that dense results may take unless said otherwise."""
SAMPLE: Final = 8
"""Modules that a dry run merges to measure what the whole would cost and lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A merged adapter in memory.

    Attributes:
        config: Its configuration.
        tensors: Canonical name -> tensor; empty after a dry run.
        report: What was lost.
        recipe: All that determines the bytes, as plain JSON values.
    """

    config: AdapterConfig
    tensors: Mapping[str, Tensor]
    report: MergeReport
    recipe: Mapping[str, Any]


def merge_adapters(
    sources: Sequence[MergeSource],
    weights: Sequence[float],
    *,
    strategy: str | Strategy = "linear",
    rank: int | None = None,
    seed: int = 0,
    dry_run: bool = False,
    modules_to_save: str | Mapping[str, str] = "refuse",
    dtype: str | torch.dtype | None = None,
    truncation: Truncation = "auto",
    threads: int | None = None,
    memory_budget: int = BUDGET,
    registry: Registry | None = None,
    progress: Listener | None = None,
    **params: Any,
) -> Merged:
    """Merge adapters that lie in memory or behind lazy tensors; nothing is written.

    The same adapters, weights, parameters and seed give the same bytes for any order of the adapters and any number
    of threads, on one build of torch and one kind of CPU.

    Args:
        sources: The adapters. A module that some of them lack is merged from those that have it.
        weights: One for each.
        strategy: Name of a merge strategy, or one.
        rank: Rank of the result; None for the strategy's own default. A module whose adapters have less gets less.
        seed: Seed of random masks.
        dry_run: Only merge a sample of the modules and report what the whole would cost and lose.
        modules_to_save: Rule for tensors trained in full: `refuse`, `first`, `mean`, an adapter's name, or a mapping
            {module: rule}.
        dtype: Dtype of the result, as a torch dtype or its name; None for the one that they share, else float32.
        truncation: How dense results of strategies on elements come to rank: `exact` by a dense SVD, `randomised`,
            `auto` exact for small sides. The report tells the error of either.
        threads: Modules merged at a time; None for torch's number of threads.
        memory_budget: Bytes for dense results of all threads together.
        registry: Where the strategy is looked up.
        progress: Called after each module, with the bytes of its factors.
        params: The strategy's own parameters.

    Raises:
        MergeError: weights, parameters, rank or adapters that the strategy cannot take, or values that are not finite.
        PluginError: an unknown strategy.
    """
    registry = registry or default_registry()
    chosen = strategy if isinstance(strategy, Strategy) else Strategy.find(strategy, registry)
    complete = chosen.complete(params)
    check_weights(chosen, _paired(sources, weights))
    _check_settings(seed, truncation, threads, memory_budget)
    workers = threads or torch.get_num_threads()
    work = _prepare(chosen, sources, weights, rank, modules_to_save, registry)
    settings = Settings(
        strategy=chosen,
        params=complete,
        seed=seed,
        dtype=_dtype(dtype, work.plans),
        truncation=truncation,
        workspace=Workspace(memory_budget // workers),
        bias=any(member.pair.bias for plan in work.plans for member in plan.members),
    )
    recipe = _recipe(work, settings, rank)
    return (_dry_run if dry_run else _merge)(work, settings, workers, recipe, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is to be merged, checked and planned; no value has been read.

    Attributes:
        ordered: Adapters and weights in canonical order.
        plans: One for each module.
        owners, decided: Tensors trained in full: who has them, and what the rule says.
        notes: What a reader of the report should know.
    """

    ordered: Sequence[tuple[MergeSource, float]]
    plans: Sequence[ModulePlan]
    owners: Mapping[str, Sequence[tuple[MergeSource, float]]]
    decided: Mapping[str, str]
    notes: tuple[str, ...]

    def config(self, ranks: Mapping[str, int], *, bias: bool) -> AdapterConfig:
        """The configuration of the result."""
        return merged_config([source for source, _ in self.ordered], self.plans, ranks, bias=bias)


def _prepare(
    chosen: Strategy,
    sources: Sequence[MergeSource],
    weights: Sequence[float],
    rank: int | None,
    rule: str | Mapping[str, str],
    registry: Registry,
) -> _Work:
    """Check everything that names, shapes and configurations tell, and plan the merge."""
    ordered = canonical_order(sources, [float(weight) for weight in weights])
    others = Strategy.every(registry)
    check_configs(chosen, sources, others)
    layouts = {source.name: source.layout for source in sources}
    in_order = [layouts[source.name] for source, _ in ordered]
    check_layouts(chosen, [source for source, _ in ordered], in_order, others)
    _check_bases(sources)
    plans = plan_modules(chosen, ordered, in_order, rank)
    owners = owners_of(list(zip(sources, weights, strict=True)), layouts)
    decided = resolve_rule(rule, owners)
    return _Work(ordered=ordered, plans=plans, owners=owners, decided=decided, notes=_notes(sources, decided))


def _merge(
    work: _Work, settings: Settings, workers: int, recipe: Mapping[str, Any], progress: Listener | None
) -> Merged:
    started = time.perf_counter()
    results = _run(work.plans, settings, workers, progress)
    _check_not_zero(settings.strategy, results)
    tensors = {name: tensor for result in results for name, tensor in result.tensors.items()}
    tensors.update(merge_full(work.decided, work.owners))
    tensors = dict(sorted(tensors.items()))
    config = work.config({result.path: result.rank for result in results}, bias=settings.bias)
    check_scales("the merged adapter", AdapterConfig.parse(config.to_json()), tensors)
    report = MergeReport(
        strategy=settings.strategy.name,
        modules=tuple(result.report for result in results),
        notes=work.notes,
        seconds=time.perf_counter() - started,
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )
    return Merged(config=config, tensors=tensors, report=report, recipe=recipe)


def _dry_run(
    work: _Work, settings: Settings, workers: int, recipe: Mapping[str, Any], progress: Listener | None
) -> Merged:
    started = time.perf_counter()
    sample = work.plans[:: max(1, len(work.plans) // SAMPLE)][:SAMPLE]
    results = _run(sample, settings, workers, progress)
    share = sum(plan.elements for plan in sample) / sum(plan.elements for plan in work.plans)
    report = MergeReport(
        strategy=settings.strategy.name,
        modules=tuple(result.report for result in results),
        notes=work.notes,
        seconds=(time.perf_counter() - started) / share,
        bytes=sum(_factor_bytes(plan, settings) for plan in work.plans),
        sampled=len(work.plans),
    )
    config = work.config({plan.path: plan.rank for plan in work.plans}, bias=settings.bias)
    return Merged(config=config, tensors={}, report=report, recipe=recipe)


def _paired(sources: Sequence[MergeSource], weights: Sequence[float]) -> dict[str, float]:
    names = [source.name for source in sources]
    if len(names) != len(weights):
        raise MergeError(
            f"{len(weights)} weights for {len(names)} adapters: {list(weights)} for {', '.join(names)}",
            remedy="give one weight for each adapter",
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MergeError(f"adapter {twice[0]!r} was named twice", remedy="name it once, with the sum of the weights")
    return dict(zip(names, weights, strict=True))


def _check_settings(seed: int, truncation: str, threads: int | None, memory_budget: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise MergeError(f"seed = {seed!r}: a seed is a whole number")
    if truncation not in get_args(Truncation):
        raise MergeError(f"truncation = {truncation!r}", remedy=choices(truncation, get_args(Truncation)))
    if threads is not None and threads < 1:
        raise MergeError(f"threads = {threads!r}: at least 1 thread works")
    if memory_budget < 1:
        raise MergeError(f"memory_budget = {memory_budget!r}: a budget is a number of bytes above 0")


def _check_bases(sources: Sequence[MergeSource]) -> None:
    known = {source.fingerprint: source.name for source in sources if source.fingerprint}
    if len(known) > 1:
        raise MergeError(
            f"{' and '.join(repr(name) for name in known.values())} were made for different bases",
            why=f"the fingerprints of their bases are {', '.join(map(str, known))}",
            remedy="merge adapters of one base",
        )


def _dtype(asked: str | torch.dtype | None, plans: Sequence[ModulePlan]) -> torch.dtype:
    if asked is None:
        found = {
            member.source.infos[name].dtype
            for plan in plans
            for member in plan.members
            for name in (member.pair.down, member.pair.up)
        }
        return DTYPES.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32
    named = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    dtype = named.get(asked, DTYPES.get(asked)) if isinstance(asked, str) else asked
    if dtype not in named.values():
        raise MergeError(f"dtype = {asked!r} is none that an adapter is stored in", remedy=choices(str(asked), named))
    assert dtype is not None
    return dtype


def _factor_bytes(plan: ModulePlan, settings: Settings) -> int:
    return plan.pair.groups * plan.rank * sum(plan.pair.shape) * settings.dtype.itemsize


def _run(
    plans: Sequence[ModulePlan], settings: Settings, workers: int, progress: Listener | None
) -> list[ModuleResult]:
    sizes = [_factor_bytes(plan, settings) for plan in plans]
    meter = Meter(progress, files=len(plans), nbytes=sum(sizes))

    def merge_one(plan: ModulePlan, size: int) -> ModuleResult:
        result = merge_module(plan, settings)
        meter.add(size)
        return result

    settle_heap()
    if min(workers, len(plans)) == 1:
        with _one_thread_each():
            torch.set_num_threads(1)
            return [merge_one(*one) for one in zip(plans, sizes, strict=True)]
    with _one_thread_each(), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(merge_one, *one) for one in zip(plans, sizes, strict=True)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _check_not_zero(strategy: Strategy, results: Sequence[ModuleResult]) -> None:
    if any(result.report.norm for result in results) or not any(result.report.sum_norm for result in results):
        return
    raise MergeError(
        f"strategy {strategy.name!r} made every delta zero, so the result would be the base",
        why="the weighted sum of the adapters is not zero",
        remedy="choose other parameters, or linear",
    )


@contextmanager
def _one_thread_each() -> Iterator[None]:
    # BLAS splits its sums by the number of threads: with one thread for each module, bytes do not depend on it.
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _recipe(work: _Work, settings: Settings, rank: int | None) -> dict[str, Any]:
    digests = {source.name: source.digest for source, _ in work.ordered}
    return {
        "kind": "merge",
        "strategy": settings.strategy.name,
        "adapters": [
            {"name": source.name, "version": source.version, "digest": source.digest, "weight": weight}
            for source, weight in work.ordered
        ],
        "params": dict(settings.params),
        "rank": rank,
        "seed": settings.seed,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "truncation": settings.truncation,
        "modules_to_save": {name: digests.get(choice, choice) for name, choice in work.decided.items()},
        "libraries": {"multilora_store": multilora_store.__version__, "torch": torch.__version__},
    }


def _notes(sources: Sequence[MergeSource], decided: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    bases = sorted({str(source.config.base_model) for source in sources})
    if len(bases) > 1:
        notes.append(f"the adapters name different bases: {', '.join(bases)}")
    notes += [f"{name}: {choice if choice == 'mean' else f'taken from {choice}'}" for name, choice in decided.items()]
    return tuple(notes)
