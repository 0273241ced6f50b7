"""`diff`: two versions side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from multilora_store.cli.documents import version_document
from multilora_store.cli.outcome import Outcome, Table
from multilora_store.cli.schema import DiffOptions
from multilora_store.cli.stores import opened_store
from multilora_store.cli.terminal import Terminal
from multilora_store.errors import MergeError

if TYPE_CHECKING:
    from multilora_store.merging import Comparison

__all__ = ["run"]

_SHOWN: Final = 12


def run(options: DiffOptions, terminal: Terminal) -> Outcome:
    """Configuration, tensors, and the deltas of each module compared; exit code 3 if the contents differ."""
    store = opened_store(options, terminal)
    left, right = store.get(options.left), store.get(options.right)
    same = left.version.digest == right.version.digest
    document: dict[str, Any] = {
        "store": store.url,
        "left": version_document(left.version),
        "right": version_document(right.version),
        "equal": same,
        "config": _fields(dict(left.config.raw), dict(right.config.raw)),
        "tensors": _tensors(left.infos, right.infos),
        "deltas": None,
    }
    if same:
        return Outcome(document=document, view=[f"{left.version} and {right.version} hold the same content"])
    from multilora_store.merging import diff

    view: list[Table | str] = [f"{left.version} and {right.version} differ", *_config_view(document["config"])]
    try:
        with terminal.progress("comparing") as progress:
            found = diff(store, str(left.version), str(right.version), progress=progress)
    except MergeError as error:  # a kind of adapter whose delta cannot be formed: tensors are all there is to compare
        view.append(f"deltas cannot be compared: {error.what}")
        view += _tensor_view(document["tensors"])
    else:
        document["deltas"] = found.to_dict()
        view += _delta_view(found)
    return Outcome(document=document, view=view, code=3)


def _fields(left: dict[str, Any], right: dict[str, Any]) -> dict[str, dict[str, Any]]:
    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value

    return {
        key: {"left": left.get(key), "right": right.get(key)}
        for key in sorted({*left, *right})
        if plain(left.get(key)) != plain(right.get(key))
    }


def _tensors(left: Any, right: Any) -> list[dict[str, str]]:
    """Tensors that are not the same bytes: on one side only, of another shape or dtype, or of other values."""
    found = []
    for name in sorted({*left, *right}):
        one, other = left.get(name), right.get(name)
        if one is None or other is None:
            found.append({"name": name, "state": "only right" if one is None else "only left"})
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            found.append({"name": name, "state": f"{one.dtype}{list(one.shape)} / {other.dtype}{list(other.shape)}"})
        elif one.sha256 != other.sha256:
            found.append({"name": name, "state": "values"})
    return found


def _config_view(fields: dict[str, dict[str, Any]]) -> list[Table | str]:
    rows = [(key, _words(pair["left"]), _words(pair["right"])) for key, pair in fields.items()]
    return [Table(columns=("config", "left", "right"), rows=rows)] if rows else []


def _tensor_view(tensors: list[dict[str, str]]) -> list[Table | str]:
    rows = [(item["name"], item["state"]) for item in tensors]
    return [Table(columns=("tensor", "state"), rows=rows[:_SHOWN]), *_more(len(rows), "tensors")]


def _delta_view(found: Comparison) -> list[Table | str]:
    """The modules that differ most, and the whole in one line."""
    modules = sorted(found.modules, key=lambda item: -item.distance)
    rows = [
        (
            item.path,
            f"{item.norms[0]:.3g}",
            f"{item.norms[1]:.3g}",
            f"{item.distance:.3g}",
            f"{item.cosine:+.3f}",
            f"{item.overlap_in:.2f}",
            f"{item.sign_conflict:.2f}",
        )
        for item in modules
    ]
    columns = ("module", "left#", "right#", "apart#", "cosine#", "overlap#", "signs#")
    only = [f"only in {side}: {', '.join(paths)}" for side, paths in zip(found.names, found.only, strict=True) if paths]
    whole = f"cosine of the deltas {found.cosine:+.4f}, signs in conflict {found.sign_conflict:.1%}"
    table = Table(columns=columns, rows=rows[:_SHOWN])
    return [table, *_more(len(rows), "modules"), *only, whole]


def _more(count: int, noun: str) -> list[str]:
    return [f"and {count - _SHOWN} {noun} more; output=json lists all"] if count > _SHOWN else []


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
