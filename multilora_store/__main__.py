"""`python -m multilora_store`, and the console script."""

from __future__ import annotations

import sys

from multilora_store.cli import main as run

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run())


if __name__ == "__main__":
    main()
