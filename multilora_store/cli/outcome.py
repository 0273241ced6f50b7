"""What a command hands to the terminal: one JSON document, the same as tables and lines, an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Column", "Outcome", "Table", "bytes_in_words", "count_in_words", "counted", "short"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, and whether it holds figures."""

    head: str
    figures: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under columns.

    Attributes:
        columns: Heads, left to right; a head that ends in `#` is a column of figures.
        rows: One tuple of words per row.
        title: Said above it, may be empty.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def heads(self) -> list[Column]:
        """The columns, `#` taken off."""
        return [Column(head.removesuffix("#"), head.endswith("#")) for head in self.columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one command.

    Attributes:
        document: What `output=json` prints; plain JSON values, stable keys.
        view: The same for people: tables, and strings that are lines of their own.
        code: 0 done, 3 the command worked and found problems.
        shown: Whether everything has been printed on the way.
        row: What a sweep puts beside the same of its other jobs when all are done; JSON values, empty for nothing.
    """

    document: Mapping[str, Any]
    view: Sequence[Table | str] = field(default=())
    code: int = 0
    shown: bool = False
    row: Mapping[str, Any] = field(default_factory=dict)


def bytes_in_words(count: int) -> str:
    """A number of bytes in at most eight characters: `920 B`, `2.8 MB`."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("the last unit takes all")


def count_in_words(count: int) -> str:
    """A count in at most six characters: `460`, `921.6k`, `1.2M`."""
    size = float(count)
    for unit in ("", "k", "M", "G"):
        if size < 1000 or unit == "G":
            return f"{size:.0f}" if unit == "" else f"{size:.1f}{unit}"
        size /= 1000
    raise AssertionError("the last unit takes all")


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 version`, `3 versions`, `2 entries`."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def short(version: str | None) -> str:
    """A version id as people read it: `v` and eight digits, which `name@` accepts."""
    return version[:9] if version else "-"
