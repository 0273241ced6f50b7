"""Progress: how far a long piece of work is, told by what does it to what shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Listener", "Meter", "Piece", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is: files (or other pieces), bytes, seconds since it began; a total of 0 is not known yet."""

    files: int
    files_total: int
    nbytes: int
    nbytes_total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds to go at this rate; None: unknown."""
        return (self.nbytes_total - self.nbytes) / self.rate if self.nbytes else None


Listener: TypeAlias = Callable[[Progress], None]


class Meter:
    """Adds up what is done, from any thread, and tells a listener after each piece, one call at a time."""

    def __init__(self, listener: Listener | None = None, *, files: int = 0, nbytes: int = 0) -> None:
        self._listener, self._lock = listener, threading.Lock()
        self._done, self._total = [0, 0], [files, nbytes]
        self._started = time.monotonic()

    @property
    def files(self) -> int:
        """Pieces that are done."""
        return self._done[0]

    @property
    def nbytes(self) -> int:
        """Bytes that are done."""
        return self._done[1]

    def expect(self, files: int, nbytes: int) -> None:
        """So much more is to be done."""
        with self._lock:
            self._total[0] += files
            self._total[1] += nbytes

    def piece(self, nbytes: int) -> Piece:
        """One piece of so many bytes, which is told of on its way."""
        return Piece(self, nbytes)

    def add(self, nbytes: int, *, files: int = 1) -> None:
        """So much is done."""
        with self._lock:
            self._done[0] += files
            self._done[1] += nbytes
            if self._listener is not None:
                self._listener(
                    Progress(
                        files=self._done[0],
                        files_total=self._total[0],
                        nbytes=self._done[1],
                        nbytes_total=self._total[1],
                        seconds=time.monotonic() - self._started,
                    )
                )


class Piece:
    """One piece of a meter's work: how far it is, then that it is done."""

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self._meter, self._nbytes, self._told = meter, nbytes, 0

    def reached(self, nbytes: int) -> None:
        """So many of its bytes are done, all told; fewer than before, where it began anew, is no news."""
        more = min(nbytes, self._nbytes) - self._told
        if more > 0:
            self._told += more
            self._meter.add(more, files=0)

    def follow(self, progress: Progress) -> None:
        """So far is the work that makes it; a listener."""
        self.reached(progress.nbytes)

    def done(self) -> None:
        """All of it is done."""
        self._meter.add(self._nbytes - self._told)
