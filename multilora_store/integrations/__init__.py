"""Programs around the library, one file each, imported only when asked for."""

from __future__ import annotations

__all__: list[str] = []
