"""The one place that prints: tables and progress on a terminal, plain lines elsewhere, JSON when asked for."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from multilora_store.cli.outcome import Outcome, Table

if TYPE_CHECKING:
    from multilora_store.storage.progress import Listener, Progress

__all__ = ["Terminal", "rank_of_environment"]


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
        if self.rank != 0 or outcome.shown:
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

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """A spinner with the time that passes, where stderr is a terminal, for work that cannot be counted."""
        if not self._draws:
            yield
            return
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        with _drawn(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
            bar.add_task(label)
            yield

    @contextmanager
    def progress(self, label: str, *, of_bytes: bool = True) -> Iterator[Listener | None]:
        """A bar with pieces, bytes, rate and time left, where stderr is a terminal; gives what the library tells.

        Without `of_bytes` pieces alone are counted.
        """
        if not self._draws:
            yield None
            return
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        words, pieces = TextColumn("{task.description}"), TextColumn("{task.fields[pieces]}")
        bar_column, rate = BarColumn(bar_width=20), TransferSpeedColumn()
        amount = (DownloadColumn(), rate) if of_bytes else ()
        with _drawn(words, bar_column, pieces, *amount, TimeRemainingColumn()) as bar:
            task = bar.add_task(label, total=None, pieces="")

            def show(now: Progress) -> None:
                done, total = (now.nbytes, now.nbytes_total) if of_bytes else (now.files, now.files_total)
                if done < bar.tasks[task].completed:  # the next phase begins
                    bar.reset(task)
                bar.update(task, completed=done, total=total, pieces=f"{now.files}/{now.files_total}")

            yield show

    @property
    def _draws(self) -> bool:
        return self.rank == 0 and not self.quiet and not self.json and sys.stderr.isatty()

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


def _drawn(*columns: Any) -> Any:
    """A live line on stderr that is wiped in the end."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    return Bar(*columns, console=Console(stderr=True), transient=True)


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
