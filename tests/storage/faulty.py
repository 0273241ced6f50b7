"""The faulty storage of the package, under the name that the tests here know."""

from __future__ import annotations

from multilora_store.testing.faulty import Fault, FaultyBlobs

__all__ = ["Fault", "FaultyBlobs"]
