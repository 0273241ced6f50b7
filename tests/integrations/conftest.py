"""Makes the helpers of this folder, and the ranks and toys of the tests of sharding, importable by their names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]
