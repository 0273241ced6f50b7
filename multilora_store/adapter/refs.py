"""References: how one version of one adapter is named, and how a reference is told from a path or a URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from multilora_store.adapter.names import check_name, check_tag
from multilora_store.errors import NameNotAllowedError

__all__ = ["Ref", "is_pattern", "source_kind"]

_ID_PREFIX: Final = re.compile(r"v[0-9a-f]{4,16}")
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_DATE_LIKE: Final = re.compile(r"\d{4}-\d{1,2}-\d{1,2}.*")

SelectorKind = Literal["latest", "id", "moment", "tag"]


@dataclass(frozen=True, slots=True)
class Ref:
    """One version of one adapter: `name` (its latest), `name@id`, `name@tag`, `name@2026-11-30`.

    Attributes:
        name: The adapter's name.
        selector: `latest`, an id or a unique prefix of one, a tag, or a date or
            moment (ISO 8601; UTC unless it says otherwise).
    """

    name: str
    selector: str = "latest"

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.kind == "moment":
            self._parse_moment()
        elif self.kind == "tag":
            check_tag(self.selector)

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Read a reference.

        Raises:
            NameNotAllowedError: the name, tag or date in it is not one.
        """
        if not isinstance(text, str):
            raise NameNotAllowedError(
                f"a reference is {text!r:.80}, of type {type(text).__name__}",
                remedy="give a string: name, name@version, name@tag or name@2026-11-30",
            )
        name, at, selector = text.partition("@")
        if at and not selector:
            raise NameNotAllowedError(
                f"reference {text!r} names no version after '@'",
                remedy=f"write {name}, {name}@latest, {name}@<version>, {name}@<tag> or {name}@2026-11-30",
            )
        return cls(name, selector or "latest")

    @property
    def kind(self) -> SelectorKind:
        """What the selector is."""
        if self.selector == "latest":
            return "latest"
        if _ID_PREFIX.fullmatch(self.selector):
            return "id"
        return "moment" if _DATE_LIKE.fullmatch(self.selector) else "tag"

    @property
    def moment(self) -> datetime | None:
        """The last instant that the selector covers (a date: the end of that day), or None."""
        return self._parse_moment() if self.kind == "moment" else None

    def _parse_moment(self) -> datetime:
        try:
            moment = datetime.fromisoformat(self.selector)
        except ValueError as error:
            raise NameNotAllowedError(
                f"{self.selector!r} in the reference {str(self)!r} is not a date: {error}",
                remedy="write 2026-11-30 or 2026-11-30T12:00:00Z",
            ) from error
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        if _DAY.fullmatch(self.selector):
            moment += timedelta(days=1) - timedelta(microseconds=1)
        return moment

    def __str__(self) -> str:
        return self.name if self.selector == "latest" else f"{self.name}@{self.selector}"


def is_pattern(text: str) -> bool:
    """Whether `text` is a pattern over names, as `team/*`."""
    return any(character in text for character in "*?[")


def source_kind(text: str) -> Literal["path", "url", "ref"]:
    """What a `source:` is: paths start with `/`, `./`, `../` or a drive letter, URLs hold `://`, all else is a ref."""
    if "://" in text:
        return "url"
    if text in {".", ".."} or re.match(r"(/|\./|\.\./|~/|[A-Za-z]:[\\/])", text):
        return "path"
    return "ref"
