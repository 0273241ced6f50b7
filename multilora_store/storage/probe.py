"""The probe: whether exclusive creation holds between racing writers on one service.

A second request that is refused proves nothing: some servers pass that and still let two racing writers
win. So several rounds of writers race for real; the answer is kept for the endpoint in the user's cache.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from multilora_store.errors import StorageError
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.locations import cache_folder, write_small
from multilora_store.storage.records import dump, parse, sha256

__all__ = ["exclusive_create_holds", "race"]

ROUNDS: Final = 6
WRITERS: Final = 8
_GOOD_FOR: Final = 30 * 86400.0

log = logging.getLogger(__name__)
_known: dict[str, bool] = {}


def exclusive_create_holds(blobs: Blobs) -> bool:
    """Whether `blobs.create` lets exactly one racing writer win: known, remembered, or probed now."""
    if blobs.exclusive != "unknown":
        return blobs.exclusive == "holds"
    if blobs.endpoint not in _known:
        answer = _recall(blobs.endpoint)
        if answer is None:
            answer = race(blobs)
            _note(blobs.endpoint, answer)
        if not answer:
            log.warning("%s does not keep exclusive creation: the store works for a single writer there", blobs.url)
        _known[blobs.endpoint] = answer
    return _known[blobs.endpoint]


def race(blobs: Blobs, *, rounds: int = ROUNDS, writers: int = WRITERS) -> bool:
    """Races `writers` threads for one key in each of `rounds` rounds; whether each round had one winner."""
    stem, keys = f"probe-{secrets.token_hex(6)}", []
    try:
        with ThreadPoolExecutor(writers) as pool:
            for number in range(rounds):
                key = f"probes/{stem}-{number}"
                keys.append(key)
                if not _one_winner(blobs, key, pool, writers):
                    return False
        return True
    finally:
        blobs.delete(keys)


def _one_winner(blobs: Blobs, key: str, pool: ThreadPoolExecutor, writers: int) -> bool:
    start = threading.Barrier(writers)
    bodies = [secrets.token_hex(16).encode() for _ in range(writers)]

    def attempt(body: bytes) -> bool:
        start.wait(30)
        return blobs.create(key, body)

    won = [body for body, created in zip(bodies, pool.map(attempt, bodies), strict=True) if created]
    found = blobs.read(key)
    if blobs.create(key, b"late") or blobs.read(key) != found:
        return False
    # A writer whose answer was lost counts as beaten although its bytes stand: no winner, but no second one.
    return won == [found] or (not won and found in bodies)


def _file(endpoint: str) -> str:
    return f"probes/{sha256(endpoint.encode())[:32]}.json"


def _recall(endpoint: str) -> bool | None:
    path = cache_folder() / _file(endpoint)
    try:
        fields = parse(path.read_bytes(), str(path), largest=4096)
        if time.time() - fields.number("time") < _GOOD_FOR and fields.text("endpoint") == endpoint:
            return fields.flag("exclusive")
    except (OSError, ValueError):
        return None  # nothing remembered, or nothing that can be believed: probe anew
    return None


def _note(endpoint: str, answer: bool) -> None:
    try:
        write_small(
            cache_folder() / _file(endpoint), dump({"endpoint": endpoint, "exclusive": answer, "time": time.time()})
        )
    except StorageError as error:
        log.debug("the probe's answer is not kept: %s", error)
