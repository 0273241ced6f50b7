"""The tables of docs/merging.md are what the code does."""

from __future__ import annotations

from pathlib import Path

from multilora_store.merging import Strategy
from multilora_store.merging.capability import KINDS, reason_against, table
from multilora_store.plugins import Parameter, default_registry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "merging.md"
OPEN = ("experts", "lora_bias", "unequal_ranks")


def strategies() -> list[Strategy]:
    return [Strategy.find(name) for name in default_registry().names("merge_strategy")]


def strategy_rows() -> list[str]:
    rows = []
    for chosen in strategies():
        items = default_registry().get("merge_strategy", chosen.name).parameters
        params = ", ".join(
            f"`{item.name}`" + ("" if item.default is Parameter.REQUIRED else f" {item.default}") for item in items
        )
        traits = chosen.traits
        fixed = traits.fixed_rank or traits.space == "factor"
        rank = ("sum" if traits.fixed_rank else "theirs") if fixed else f"{traits.default_rank}, or `rank`"
        cells = ["yes" if reason_against(chosen, kind) is None else "no" for kind in OPEN]
        rows.append(f"| `{chosen.name}` | {traits.space} | {rank} | {params or '-'} | {' | '.join(cells)} |")
    return rows


def kind_rows() -> list[str]:
    cells = table(strategies())
    rows = []
    for kind in KINDS:
        reasons = {name: row[kind] for name, row in cells.items() if row[kind] is not None}
        if not reasons:
            rows.append(f"| `{kind}` | all | |")
        elif len(reasons) == len(cells):
            (reason,) = set(reasons.values())
            rows.append(f"| `{kind}` | none | {reason} |")
        else:
            (reason,) = set(reasons.values())
            rows.append(f"| `{kind}` | see above | {reason} |")
    return rows


def test_every_strategy_stands_in_the_table_as_it_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [row for row in [*strategy_rows(), *kind_rows()] if row not in text]
    assert not missing, "\n".join(missing)


def test_every_citation_stands_on_the_page() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    missing = [
        s.traits.citation for s in strategies() if not s.name.startswith("peft_") and s.traits.citation not in text
    ]
    assert not missing, "\n".join(missing)
