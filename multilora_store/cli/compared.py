"""Merges side by side: one row for each, from a merge just made or from what a store holds of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from multilora_store.cli.outcome import Table, bytes_in_words, short

if TYPE_CHECKING:
    from multilora_store.storage import Version

__all__ = ["merge_row", "merge_table", "stored_merge"]


def merge_row(
    name: str,
    version: str | None,
    recipe: Mapping[str, Any],
    report: Mapping[str, Any],
    seconds: float | None = None,
) -> dict[str, Any]:
    """A merge as one row, in JSON values.

    Args:
        name, version: What it was written as; None after a dry run.
        recipe: All that determines its bytes.
        report: What it lost, as it stands in the version's metadata.
        seconds: How long it took, where that is known.
    """
    modules = report["modules"]
    return {
        "name": name,
        "version": version,
        "strategy": recipe["strategy"],
        "params": dict(recipe["params"]),
        "weights": {adapter["name"].partition("@")[0]: adapter["weight"] for adapter in recipe["adapters"]},
        "rank": max((module["rank"] for module in modules), default=0),
        "norm": math.sqrt(math.fsum(module["norm"] ** 2 for module in modules)),
        "error": report["error"],
        "sum_distance": report["sum_distance"],
        "bytes": report["bytes"],
        "seconds": seconds,
    }


def stored_merge(version: Version) -> dict[str, Any] | None:
    """The row of a stored version; None where it is no merge."""
    report = version.metadata.get("merge_report")
    if version.recipe is None or version.recipe.get("kind") != "merge" or report is None:
        return None
    return merge_row(version.name, version.id, version.recipe, report)


def merge_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows for people."""
    heads = ("merge", "strategy", "params", "weights", "rank#", "norm#", "error#", "to the sum#", "size#", "seconds#")
    return Table(columns=heads, rows=[_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["name"] if row["version"] is None else f"{row['name']}@{short(row['version'])}",
        row["strategy"],
        _words(row["params"]),
        _words(row["weights"]),
        str(row["rank"]),
        f"{row['norm']:.3g}",
        _ratio(row["error"]),
        _ratio(row["sum_distance"]),
        bytes_in_words(row["bytes"]),
        "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
    )


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def _ratio(value: float | None) -> str:
    return "inf" if value is None else f"{value:.2e}"
