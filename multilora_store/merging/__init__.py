"""Merging: low-rank algebra, strategies as pure functions, merging of stored adapters without a base model."""

from __future__ import annotations

from multilora_store.merging.adapters import Merged, merge_adapters
from multilora_store.merging.base_merge import BaseMergeReport, export_merged
from multilora_store.merging.compare import Comparison, compare, diff
from multilora_store.merging.merge import MergeResult, merge
from multilora_store.merging.source import MergeSource, parents_of
from multilora_store.merging.strategy import Strategy, strategy

__all__ = [
    "BaseMergeReport",
    "Comparison",
    "MergeResult",
    "MergeSource",
    "Merged",
    "Strategy",
    "compare",
    "diff",
    "export_merged",
    "merge",
    "merge_adapters",
    "parents_of",
    "strategy",
]
