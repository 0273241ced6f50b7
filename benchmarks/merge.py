"""Merging, side by side with PEFT's add_weighted_adapter in one run, and on the shapes of an 8B model from files.

    python benchmarks/merge.py sides                          # d = 576 and 2048
    python benchmarks/merge.py sides --sizes 576 2048 4096 --ranks 8 16 32 64 --adapters 2 4 8 16    # ten minutes
    python benchmarks/merge.py set                            # linear, svd, knots, core_space: 32 layers, from files
    python benchmarks/merge.py elements                       # ties, dare_*, ...: one layer, beside its lower bounds
    python benchmarks/merge.py losses --base SMOLLM2_FOLDER --shared ../shared    # a real model and real adapters
    ... --json results.json

Both sides use the same number of threads (OMP_NUM_THREADS, or --threads). The times of `sides` are processor time,
which other processes do not stretch: the best of --repeats for us, one run for PEFT, whose time is long. Memory is the
high-water mark of the resident set: its rise during the call for `sides`, the whole of it for `set`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from multilora_store.merging import Merged, MergeSource, merge, merge_adapters
from multilora_store.merging.blocks import Matrix, block_rows
from multilora_store.plugins import default_registry
from multilora_store.storage import Store, open_store, read_peft_dir

LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
"""Rows and columns of the adapted matrices of one layer of Llama 3 8B."""
ELEMENTS = ["ties", "dare_linear", "dare_ties", "magnitude_prune", "breadcrumbs", "della"]


def main() -> None:
    """Run one benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sides = commands.add_parser("sides", help="ours and PEFT's on one square matrix")
    sides.add_argument("--sizes", type=int, nargs="+", default=[576, 2048])
    sides.add_argument("--ranks", type=int, nargs="+", default=[16])
    sides.add_argument("--adapters", type=int, nargs="+", default=[4])
    sides.add_argument("--strategies", nargs="+", default=["svd"], help="svd, linear, cat, ties_svd, ...")
    sides.add_argument("--repeats", type=int, default=5)
    whole = commands.add_parser("set", help="four adapters with the shapes of an 8B model, from files")
    whole.add_argument("--strategies", nargs="+", default=["linear", "svd", "knots", "core_space"])
    whole.add_argument("--layers", type=int, default=32)
    whole.add_argument("--rank", type=int, default=16)
    whole.add_argument("--adapters", type=int, default=4)
    whole.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    whole.add_argument("--threads", type=int, default=2)
    layer = commands.add_parser("elements", help="strategies on elements on one layer of an 8B model")
    layer.add_argument("--strategies", nargs="+", default=ELEMENTS)
    layer.add_argument("--rank", type=int, default=16)
    layer.add_argument("--adapters", type=int, default=4)
    layer.add_argument("--threads", type=int, default=1)
    losses = commands.add_parser("losses", help="held-out losses of a real model under every strategy")
    losses.add_argument("--base", type=Path, required=True)
    losses.add_argument("--shared", type=Path, required=True)
    losses.add_argument("--adapters", nargs="+", default=["code_style", "safety"])
    losses.add_argument("--strategies", nargs="+", default=list(default_registry().names("merge_strategy")))
    for command in (sides, whole, layer, losses):
        command.add_argument("--json", type=Path)
    args = parser.parse_args()
    run = {"sides": compare_sides, "set": merge_set, "elements": merge_elements, "losses": measure_losses}
    rows = list(run[args.command](args))
    about = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "peft": version("peft"),
        "arguments": {key: str(value) for key, value in vars(args).items()},
    }
    print("  ".join(f"{key} {value}" for key, value in about.items() if key != "arguments"))
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def compare_sides(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each size, rank, number of adapters and strategy."""
    print(f"{'strategy':>12} {'d':>5} {'r':>3} {'n':>3} {'PEFT s':>9} {'ours s':>9} {'ratio':>7} ", end="")
    print(f"{'PEFT MiB':>9} {'ours MiB':>9} {'apart':>8} {'to sum':>8} {'PEFT to sum':>11}")
    for cell in itertools.product(args.strategies, args.sizes, args.ranks, args.adapters):
        yield compare_side(*cell, args.repeats)


def compare_side(name: str, size: int, rank: int, count: int, repeats: int) -> dict[str, Any]:
    """Merge the same adapters with PEFT and with us."""
    model, sources, weights = peft_model(size, rank, count)
    params = {} if name in ("svd", "linear", "cat") else {"density": 0.5}
    theirs_cost, _ = measured(
        lambda: model.add_weighted_adapter([s.name for s in sources], weights, "m", combination_type=name, **params)
    )
    ours = "linear" if name == "linear" else name if name in ("svd", "cat") else f"peft_{name}"
    rank_asked = {"rank": rank} if name in ("svd", "linear") else {}
    costs, merged = [], None
    for _ in range(repeats):
        cost, merged = measured(lambda: merge_adapters(sources, weights, strategy=ours, **rank_asked, **params))
        costs.append(cost)
    best = min(costs, key=lambda cost: cost.processor)
    assert merged is not None
    layer = model.base_model.model.lin
    total = sum(w * layer.get_delta_weight(s.name) for s, w in zip(sources, weights, strict=True))
    theirs, mine = layer.get_delta_weight("m"), dense_of(merged)
    row = {
        "strategy": name,
        "size": size,
        "rank": rank,
        "adapters": count,
        "peft": theirs_cost._asdict(),
        "ours": best._asdict(),
        "ratio": theirs_cost.processor / best.processor,
        "apart": float((mine - theirs).norm() / theirs.norm()),
        "to_sum": float((mine - total).norm() / total.norm()),
        "peft_to_sum": float((theirs - total).norm() / total.norm()),
    }
    print(
        f"{name:>12} {size:>5} {rank:>3} {count:>3} {theirs_cost.processor:>9.3f} {best.processor:>9.4f} "
        f"{row['ratio']:>7.0f} {theirs_cost.mebibytes:>9.0f} {best.mebibytes:>9.0f} "
        f"{row['apart']:>8.1e} {row['to_sum']:>8.1e} {row['peft_to_sum']:>11.1e}",
        flush=True,
    )
    return row


def peft_model(size: int, rank: int, count: int) -> tuple[Any, list[MergeSource], list[float]]:
    """A model of one square layer with `count` random adapters, and the adapters as files hold them."""
    import peft

    torch.manual_seed(0)

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(size, size, bias=False)

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["lin"], init_lora_weights=False)
    names = [f"a{index}" for index in range(count)]
    model = peft.get_peft_model(One(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    sources = [
        MergeSource.in_memory(
            name,
            config.to_dict(),
            {key: t.detach().clone() for key, t in peft.get_peft_model_state_dict(model, adapter_name=name).items()},
        )
        for name in names
    ]
    return model, sources, [1.0 / (index + 1) for index in range(count)]


def dense_of(merged: Merged) -> torch.Tensor:
    """The delta of the one layer."""
    prefix = "base_model.model.lin"
    return merged.tensors[f"{prefix}.lora_B.weight"] @ merged.tensors[f"{prefix}.lora_A.weight"]


def merge_set(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each strategy: wall-clock time and peak memory of reading, merging and writing."""
    with tempfile.TemporaryDirectory(prefix="merge-set-") as folder:
        store = open_store(folder)
        names = [f"a{index}" for index in range(args.adapters)]
        for seed, name in enumerate(names):
            put_random(store, name, seed, args)
        print(f"{'strategy':>16} {'s':>8} {'CPU s':>8} {'peak MiB':>9} {'out MiB':>8} {'error':>8} {'to sum':>8}")
        for strategy in args.strategies:
            yield merge_one(store, strategy, names, args)


def merge_one(store: Store, strategy: str, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Merge the whole set from its files into its files."""
    weights = {name: 1.0 / len(names) for name in names}
    params = {"density": 0.5} if strategy.startswith("peft_") and strategy.endswith(("ties", "ties_svd")) else {}
    start = high_water()
    cost, result = measured(
        lambda: merge(store, weights, strategy=strategy, into=f"m-{strategy}", threads=args.threads, **params)
    )
    row = {
        "strategy": strategy,
        "seconds": cost.seconds,
        "processor_seconds": cost.processor,
        "peak_mebibytes": high_water(),
        "resident_before": start,
        "out_mebibytes": result.report.bytes / 2**20,
        "error": result.report.error,
        "to_sum": result.report.sum_distance,
    }
    print(
        f"{strategy:>16} {cost.seconds:>8.1f} {cost.processor:>8.1f} {row['peak_mebibytes']:>9.0f} "
        f"{row['out_mebibytes']:>8.0f} {row['error']:>8.1e} {row['to_sum']:>8.1e}",
        flush=True,
    )
    return row


def merge_elements(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each strategy on one layer in memory, first what no strategy on elements can do without."""
    adapters = [random_adapter(seed, layers=1, rank=args.rank) for seed in range(args.adapters)]
    sources = [MergeSource.in_memory(f"a{seed}", config, tensors) for seed, (tensors, config) in enumerate(adapters)]
    elements = sum(rows * columns for rows, columns in LAYER.values())
    print(f"{'':>24} {'s':>7} {'CPU s':>7} {'MiB':>6} {'error':>8}")
    bounds = {"read and write": touch_deltas, "form from factors": form_deltas, "project twice": project_results}
    for name, bound in bounds.items():
        cost, _ = measured(lambda bound=bound: bound(sources))
        print(f"{name:>24} {cost.seconds:>7.2f} {cost.processor:>7.2f} {cost.mebibytes:>6.0f}", flush=True)
        yield {"bound": name, "elements": elements * args.adapters, **cost._asdict()}
    for strategy in args.strategies:
        weights = [1.0 / len(sources)] * len(sources)
        call = partial(merge_adapters, sources, weights, strategy=strategy, threads=args.threads)
        cost, merged = measured(call)
        row = {"strategy": strategy, "error": merged.report.error, **cost._asdict()}
        print(
            f"{strategy:>24} {cost.seconds:>7.2f} {cost.processor:>7.2f} {cost.mebibytes:>6.0f} {row['error']:>8.1e}",
            flush=True,
        )
        yield row


def touch_deltas(sources: list[MergeSource]) -> None:
    """Read as many elements as the deltas have and write as many as the result has, in the dense form."""
    for rows, columns in LAYER.values():
        delta, result = torch.ones(rows, columns), torch.zeros(rows, columns)
        for _ in sources:
            result.add_(delta)


def form_deltas(sources: list[MergeSource]) -> None:
    """Multiply the factors of every delta out, block by block."""
    for path in sources[0].layout.pairs:
        for source in sources:
            matrix = Matrix.of_delta(source.layout.pairs[path].read(source.tensors), ("",))
            for rows in block_rows(matrix.shape):
                matrix.block(rows)


def project_results(sources: list[MergeSource]) -> None:
    """Multiply dense results and their transposes by as many columns as a truncation to the summed rank takes."""
    width = 16 + sum(next(iter(source.layout.pairs.values())).rank for source in sources)
    for rows, columns in LAYER.values():
        result = torch.ones(min(rows, 512), columns)  # a part that stays in the cache: the products alone
        right, left = torch.ones(columns, width), torch.ones(result.shape[0], width)
        for _ in range(rows // result.shape[0]):
            _ = result @ right
            _ = result.mT @ left


def put_random(store: Store, name: str, seed: int, args: argparse.Namespace) -> None:
    """One adapter over all layers."""
    tensors, config = random_adapter(seed, layers=args.layers, rank=args.rank, dtype=getattr(torch, args.dtype))
    store.put(name, tensors, config)


def random_adapter(
    seed: int, *, layers: int, rank: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and config of one, its factors with a part common to all adapters, as fine-tunes of one base have."""
    own, shared = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layers):
        for path, (rows, columns) in LAYER.items():
            prefix = f"base_model.model.model.layers.{layer}.{path}"
            for leaf, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                common = torch.randn(shape, generator=shared)
                values = 0.01 * (0.5 * common + torch.randn(shape, generator=own))
                tensors[f"{prefix}.{leaf}.weight"] = values.to(dtype)
    targets = sorted(path.rpartition(".")[2] for path in LAYER)
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}


def measure_losses(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each strategy at its defaults, every weight 1; first the base, and the adapters active together."""
    from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = importlib.util.spec_from_file_location("losses", args.shared / "data" / "recipes" / "losses.py")
    assert recipe is not None
    assert recipe.loader is not None
    module = importlib.util.module_from_spec(recipe)
    recipe.loader.exec_module(module)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    print(f"{'strategy':>24} " + " ".join(f"{name:>12}" for name in args.adapters) + f" {'error':>8} {'to sum':>8}")

    def row(name: str, model: Any, merged: Merged | None) -> dict[str, Any]:
        found = [module.heldout_loss(model, tokenizer, text) for text in args.adapters]
        error, to_sum = (merged.report.error, merged.report.sum_distance) if merged else (0.0, 0.0)
        print(
            f"{name:>24} " + " ".join(f"{loss:>12.4f}" for loss in found) + f" {error:>8.1e} {to_sum:>8.1e}", flush=True
        )
        return {
            "strategy": name,
            "losses": dict(zip(args.adapters, found, strict=True)),
            "error": error,
            "to_sum": to_sum,
        }

    yield row("base", base, None)
    folders = [args.shared / "data" / "adapters" / name for name in args.adapters]
    both = PeftModel.from_pretrained(base, folders[0], adapter_name=args.adapters[0])
    for name, folder in zip(args.adapters[1:], folders[1:], strict=True):
        both.load_adapter(folder, adapter_name=name)
    both.base_model.set_adapter(list(args.adapters))
    yield row("active together", both, None)
    base = both.unload()
    read = [read_peft_dir(folder) for folder in folders]
    sources = [MergeSource.in_memory(n, f.config, f.tensors) for n, f in zip(args.adapters, read, strict=True)]
    for strategy in args.strategies:
        known = {item.name for item in default_registry().get("merge_strategy", strategy).parameters}
        params = {"density": 0.5} if strategy.startswith("peft_") and "density" in known else {}
        try:
            merged = merge_adapters(sources, [1.0] * len(sources), strategy=strategy, **params)
        except ValueError as error:  # a strategy that says no to these adapters
            print(f"{strategy:>24} {str(error).splitlines()[0]}", flush=True)
            continue
        fields = {key: value for key, value in merged.config.raw.items() if key != "peft_version"}
        model = get_peft_model(base, LoraConfig(**fields))
        set_peft_model_state_dict(model, dict(merged.tensors))
        yield row(strategy, model, merged)
        base = model.unload()


class Cost(NamedTuple):
    """Wall-clock and processor seconds, and the rise of the high-water mark in MiB."""

    seconds: float
    processor: float
    mebibytes: float


def measured(call: Callable[[], Any]) -> tuple[Cost, Any]:
    """What a call costs, and its result."""
    with high_water_reset() as before:
        start, processor = time.perf_counter(), time.process_time()
        result = call()
        cost = Cost(time.perf_counter() - start, time.process_time() - processor, high_water() - before)
        return cost, result


@contextmanager
def high_water_reset() -> Iterator[float]:
    """Set the process's high-water mark to what is resident now, and yield that in MiB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    yield high_water()


def high_water() -> float:
    """The highest resident set since the last reset, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    main()
