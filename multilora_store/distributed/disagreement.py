"""Where ranks differ: the places at which what each was given is not the same, and the error that says so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from multilora_store.errors import DisagreementError

__all__ = ["canonical", "differences", "disagreement", "joined"]

SHOWN_DIFFERENCES: Final = 12
_MISSING: Final = "missing"


def canonical(value: Any) -> str:
    """The value as JSON, the same text for equal values; what JSON has no word for, as `str` has it."""
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))


def differences(given: Sequence[Any]) -> dict[str, list[Any]]:
    """Path -> what each rank has there, for every place where these JSON-like values differ, shallow ones first.

    Where a whole branch is missing on some rank, the branch is named, not its leaves.
    """
    found = dict(_differing([json.loads(canonical(value)) for value in given], ""))
    return dict(sorted(found.items(), key=lambda item: item[0].count(".") + item[0].count("[")))


def _differing(values: list[Any], path: str) -> Iterator[tuple[str, list[Any]]]:
    if all(isinstance(value, dict) for value in values):
        for key in sorted({key for value in values for key in value}):
            yield from _differing([value.get(key, _MISSING) for value in values], f"{path}.{key}" if path else key)
    elif all(isinstance(value, list) for value in values):
        for index in range(max(map(len, values))):
            items = [value[index] if index < len(value) else _MISSING for value in values]
            yield from _differing(items, f"{path}[{index}]")
    elif any(value != values[0] for value in values):
        yield path or "value", [_MISSING if v is _MISSING else _brief(v, values) for v in values]


def _brief(value: Any, values: list[Any]) -> Any:
    return "present" if _MISSING in values and isinstance(value, (dict, list)) and value else value


def disagreement(subject: str, reports: Sequence[Any], members: Sequence[int]) -> DisagreementError:
    """The error of what ranks reported, as (call, facts, ...); it names the ranks that are in the minority."""
    subjects = [report[0] for report in reports]
    if len(set(subjects)) > 1:
        given: list[Any] = [{"call": name} for name in subjects]
    else:
        given = [report[1] for report in reports]
    found = differences(given)
    lines = [f"  {path}: {_by_rank(values, members)}" for path, values in list(found.items())[:SHOWN_DIFFERENCES]]
    if len(found) > SHOWN_DIFFERENCES:
        lines.append(f"  and {len(found) - SHOWN_DIFFERENCES} more")
    odd = sorted({members[i] for values in found.values() for i in _minority(values)})
    return DisagreementError(
        f"ranks disagree on {' / '.join(dict.fromkeys(subjects))}: rank {joined(odd)} differs",
        why="\n".join(lines),
        remedy="give every rank the same configuration and make the same calls in the same order",
        subject=subject,
        ranks=odd,
        differences=found,
    )


def _minority(values: Sequence[Any]) -> list[int]:
    """Places whose value is not the commonest; on a tie, not that of the first place."""
    keys = [canonical(value) for value in values]
    counts = Counter(keys)
    top = max(counts.values())
    usual = next(key for key in keys if counts[key] == top)
    return [place for place, key in enumerate(keys) if key != usual]


def _by_rank(values: Sequence[Any], members: Sequence[int]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in zip(members, values, strict=True):
        groups.setdefault(value if isinstance(value, str) else canonical(value), []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {joined(ranks)}" for value, ranks in groups.items()
    )


def joined(ranks: Sequence[int]) -> str:
    """Ranks as a sentence has them."""
    return ", ".join(str(rank) for rank in ranks)
