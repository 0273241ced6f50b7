"""The one place that prints: tables and progress on a terminal, plain lines elsewhere, JSON when asked for."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from multilora_store.cli.outcome import Outcome, Table

__all__ = ["Terminal", "rank_of_environment"]

T = TypeVar("T")


def rank_of_environment() -> int:
    """This process's rank as torchrun tells it; 0 where there is none."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """Where a command's words go.

    Attributes:
        command: The command's name.
        json: Whether results are one JSON document.
        quiet: Whether only errors are printed.
        rank: Only rank 0 prints results.
    """

    command: str
    json: bool = False
    quiet: bool = False
    rank: int = 0

    def show(self, outcome: Outcome) -> None:
        """Print the result."""
        if self.rank != 0:
            return
        if self.json:
            self._document(outcome.document, outcome.code)
        elif not self.quiet:
            for item in outcome.view:
                _print_table(item) if isinstance(item, Table) else print(item)
        sys.stdout.flush()

    def fail(self, lines: Sequence[str], document: Mapping[str, Any], code: int) -> None:
        """Print an error: what, why and remedy, one line each; on another rank than 0, with its number."""
        if self.json and self.rank == 0:
            self._document({"error": dict(document)}, code)
        prefix = f"rank {self.rank}: " if self.rank else ""
        what, *rest = lines or ["failed"]
        print("\n".join([f"{prefix}error: {what}", *(f"  {line}" for line in rest)]), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line beside the result, on stderr, so that a pipe of results stays clean."""
        if self.rank == 0 and not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def progress(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Pass `items` through, with a bar where stderr is a terminal."""
        if self.rank != 0 or self.quiet or self.json or not sys.stderr.isatty():
            yield from items
            return
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description=label, total=total, console=Console(stderr=True), transient=True)

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """A spinner with the time that passes, where stderr is a terminal, for work that cannot be counted."""
        if self.rank != 0 or self.quiet or self.json or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task(label)
            yield

    @contextmanager
    def transfer(self, label: str) -> Iterator[Callable[[Any], None] | None]:
        """A bar with bytes, rate and time left, where stderr is a terminal; its callback takes a storage `Progress`."""
        if self.rank != 0 or self.quiet or self.json or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda now: bar.update(task, completed=now.nbytes, total=now.nbytes_total)

    @contextmanager
    def warnings_as_lines(self) -> Iterator[None]:
        """Warnings of the library as one line each, on rank 0 alone."""

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            self.note(f"warning: {' '.join(str(message).split())}")

        with warnings.catch_warnings():
            warnings.showwarning = show
            yield

    def _document(self, document: Mapping[str, Any], code: int) -> None:
        whole = {"command": self.command, "exit": code, **document}
        print(json.dumps(whole, ensure_ascii=False, allow_nan=False, default=str), flush=True)


def _print_table(table: Table) -> None:
    if not table.rows:
        return
    if sys.stdout.isatty():
        _print_rich(table)
        return
    heads = table.heads()
    rows = [[head.head for head in heads], *([str(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    if table.title:
        print(table.title)
    for row in rows:
        cells = (
            cell.rjust(width) if head.figures else cell.ljust(width)
            for cell, width, head in zip(row, widths, heads, strict=True)
        )
        print("  ".join(cells).rstrip())


def _print_rich(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        box=None,
        title=table.title or None,
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        collapse_padding=True,
    )
    for head in table.heads():
        drawn.add_column(head.head, justify="right" if head.figures else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    Console().print(drawn)
