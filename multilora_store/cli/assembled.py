"""An assembled model as rows: what each adapter brought, and what each rank holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from multilora_store.cli.outcome import Table, bytes_in_words, count_in_words, counted, short
from multilora_store.manifest import Lock

if TYPE_CHECKING:
    from torch import nn

    from multilora_store.distributed.agreement import Ranks

__all__ = ["AdapterRow", "ShardReport", "adapter_rows", "export_set", "set_view", "shard_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """One adapter of an assembled model, whole: before any sharding.

    Attributes:
        targets: Modules of the base that it matched.
        dtype: The dtype of its tensors, several joined by `+`.
        bytes: Of all its tensors.
        source: What it came from: a reference, a path, a URL, or `created`.
    """

    name: str
    version: str | None
    peft_type: str
    rank: int
    targets: int
    tensors: int
    parameters: int
    dtype: str
    bytes: int
    active: bool
    weight: float
    trainable: bool
    source: str
    store: str | None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def adapter_rows(model: nn.Module, lock: Lock) -> list[AdapterRow]:
    """A row for each adapter that the model carries, in order."""
    from multilora_store.assembly.bridge import (
        active_adapters,
        adapter_buffers,
        adapter_config,
        adapter_modules,
        adapter_names,
        adapter_parameters,
        record,
        trainable_adapters,
    )

    active, trainable, known = active_adapters(model), trainable_adapters(model), record(model)
    rows = []
    for name in adapter_names(model):
        tensors = [*adapter_parameters(model, name).values(), *adapter_buffers(model, name).values()]
        config = adapter_config(model, name)
        version, entry = known.versions.get(name), lock.entries.get(name)
        source = "created" if entry is not None and entry.fresh else entry.spec.source if entry else "assembler"
        rows.append(
            AdapterRow(
                name=name,
                version=version.id if version is not None else None,
                peft_type=config.peft_type,
                rank=config.r,
                targets=len(_targets(adapter_modules(model, name))),
                tensors=len(tensors),
                parameters=sum(tensor.numel() for tensor in tensors),
                dtype="+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
                bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                active=name in active,
                weight=active.get(name, entry.spec.weight if entry else 1.0),
                trainable=name in trainable,
                source=source,
                store=entry.store if entry else None,
            )
        )
    return rows


def _targets(modules: Mapping[str, Any]) -> set[str]:
    """Paths of the base's modules, told from the adapter's own parts on them."""
    parts = ("lora_", "modules_to_save", "token_adapter", "ia3_", "original_module")
    found = set()
    for path in modules:
        segments = path.split(".")
        cut = next((at for at, segment in enumerate(segments) if segment.startswith(parts)), len(segments))
        found.add(".".join(segments[:cut]))
    return found


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def set_view(rows: list[AdapterRow]) -> list[Table | str]:
    """The table of a set, in at most 80 columns for ordinary names, and where each adapter came from."""
    table = Table(
        columns=(
            "adapter",
            "version",
            "rank#",
            "targets#",
            "tensors#",
            "params#",
            "dtype",
            "size#",
            "active#",
            "train",
        ),
        rows=[
            (
                row.name,
                short(row.version),
                str(row.rank),
                str(row.targets),
                str(row.tensors),
                count_in_words(row.parameters),
                "+".join(_DTYPES.get(name, name) for name in row.dtype.split("+")),
                bytes_in_words(row.bytes),
                f"{row.weight:g}" if row.active else "-",
                "yes" if row.trainable else "-",
            )
            for row in rows
        ],
    )
    sources = [f"{row.name} <- {row.source}" + (f" in {row.store}" if row.store else "") for row in rows]
    total = sum(row.bytes for row in rows)
    return [table, *sources, f"{counted(len(rows), 'adapter')}, {bytes_in_words(total)}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """What each rank holds after the wrap.

    Attributes:
        backend: `fsdp2` or `fsdp1`.
        granularity: `adapter` or `layer`.
        units: FSDP units in all.
        ranks: Per rank, bytes of the base and of each adapter.
    """

    backend: str
    granularity: str
    units: int
    ranks: tuple[dict[str, Any], ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def view(self) -> list[Table | str]:
        """A row per rank."""
        names = list(self.ranks[0]["adapters"])[:6]
        columns = ("rank#", "base#", *(f"{name}#" for name in names), "adapters#")
        rows = [
            (
                str(rank["rank"]),
                bytes_in_words(rank["base_bytes"]),
                *(bytes_in_words(rank["adapters"][name]) for name in names),
                bytes_in_words(sum(rank["adapters"].values())),
            )
            for rank in self.ranks
        ]
        title = f"{self.backend} over {len(self.ranks)} ranks, {self.units} units, granularity {self.granularity}"
        return [Table(columns=columns, rows=rows, title=title)]


def shard_report(model: nn.Module, ranks: Ranks) -> ShardReport:
    """Audit the sharded model on every rank and collect what each holds; the same call on every rank.

    Raises:
        AuditError: an adapter's parameter that no unit covers.
    """
    from multilora_store.distributed import audit

    report = audit(model)
    report.raise_if_failed()
    mine = {
        "rank": ranks.members[ranks.rank],
        "base_bytes": report.base_local_nbytes,
        "adapters": {name: item.local_nbytes for name, item in report.adapters.items()},
    }
    return ShardReport(
        backend=report.backend,
        granularity=report.granularity,
        units=report.units,
        ranks=tuple(ranks.share("what each rank holds", mine)),
    )


def export_set(model: nn.Module, target: str) -> dict[str, str]:
    """Write every adapter of the model, as it is now, as a PEFT folder under `target`; name -> folder."""
    from multilora_store.assembly.bridge import adapter_buffers, adapter_config, adapter_names, adapter_parameters
    from multilora_store.storage import export_adapter, open_store

    passing: Any = open_store(f"memory://multilora-export-{uuid4().hex}")
    places = {}
    for name in adapter_names(model):
        tensors = {
            key: tensor.detach()
            for key, tensor in {**adapter_parameters(model, name), **adapter_buffers(model, name)}.items()
        }
        version = passing.put(name, tensors, adapter_config(model, name))
        place = f"{target.rstrip('/')}/{name}" if "://" in target else Path(target) / name
        places[name] = str(export_adapter(passing, f"{name}@{version.id}", place))
    return places
