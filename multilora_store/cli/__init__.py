"""The command line: Hydra at the door, one function per command; the only place that prints or exits."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name; `sys.argv[1:]` by default) and return its exit code."""
    from multilora_store.cli.door import run

    return run(argv)
