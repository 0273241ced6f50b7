"""The suite that every storage must pass; it ships with the package, for the authors of other storages."""

from __future__ import annotations

from multilora_store.testing.blobs import HOSTILE, BlobsSuite

__all__ = ["HOSTILE", "BlobsSuite"]
