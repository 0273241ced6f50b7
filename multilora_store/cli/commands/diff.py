"""`diff`: two versions side by side."""

from __future__ import annotations

import math
from typing import Any

from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome, Table
from multilora_store.cli.schema import DiffOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal

__all__ = ["run"]


def run(options: DiffOptions, terminal: Terminal) -> Outcome:
    """Configuration fields and tensors that differ, with distances; exit code 3 if anything does."""
    store = opened_store(options, terminal)
    left, right = store.get(options.left), store.get(options.right)
    fields = _fields(dict(left.config.raw), dict(right.config.raw))
    tensors = _tensors(left, right)
    same = left.version.digest == right.version.digest
    document = {
        "store": store.url,
        "left": version_document(left.version),
        "right": version_document(right.version),
        "equal": same,
        "config": fields,
        "tensors": tensors,
    }
    names = f"{left.version} and {right.version}"
    if same:
        return Outcome(document=document, view=[f"{names} hold the same content"])
    rows = [(key, _words(pair["left"]), _words(pair["right"])) for key, pair in fields.items()]
    figures = [
        (item["name"], item["state"], _figure(item.get("relative")), _figure(item.get("cosine"))) for item in tensors
    ]
    view: list[Table | str] = [
        f"{names} differ",
        Table(columns=("config", str(left.version), str(right.version)), rows=rows),
        Table(columns=("tensor", "state", "distance#", "cosine#"), rows=figures),
    ]
    return Outcome(document=document, view=view, code=3)


def _fields(left: dict[str, Any], right: dict[str, Any]) -> dict[str, dict[str, Any]]:
    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value

    return {
        key: {"left": left.get(key), "right": right.get(key)}
        for key in sorted({*left, *right})
        if plain(left.get(key)) != plain(right.get(key))
    }


def _tensors(left: Any, right: Any) -> list[dict[str, Any]]:
    """Tensors that are not the same bytes: on one side only, of another shape, or with their relative distance."""
    found: list[dict[str, Any]] = []
    for name in sorted({*left.infos, *right.infos}):
        one, other = left.infos.get(name), right.infos.get(name)
        if one is None or other is None:
            found.append({"name": name, "state": "only right" if one is None else "only left"})
        elif one.shape != other.shape:
            found.append({"name": name, "state": f"{list(one.shape)} / {list(other.shape)}"})
        elif one.sha256 != other.sha256:
            found.append({"name": name, "state": "values", **_distance(left.tensors[name], right.tensors[name])})
    return found


def _distance(one: Any, other: Any) -> dict[str, float | None]:
    """Distance relative to the left one's norm, and the cosine; None where a norm is zero."""
    x, y = one.double().flatten(), other.double().flatten()
    nx, ny, apart = float(x.norm()), float(y.norm()), float((x - y).norm())
    cosine = float(x @ y) / (nx * ny) if nx and ny else None
    relative = apart / nx if nx else None
    return {
        "relative": relative if relative is not None and math.isfinite(relative) else None,
        "cosine": cosine if cosine is not None and math.isfinite(cosine) else None,
    }


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
