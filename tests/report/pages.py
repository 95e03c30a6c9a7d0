"""A page taken apart: its elements, its words, the data of its charts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fedtailor.report.write import write

Attributes = dict[str, str | None]


@dataclass
class Parsed(HTMLParser):
    """All elements with their attributes, and the text outside of scripts and styles."""

    elements: list[tuple[str, Attributes]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    scripts: list[tuple[Attributes, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self.inside != "style":
            self.words.append(data)

    def of(self, tag: str) -> list[Attributes]:
        """The attributes of every such element."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        """As it is read, on one line."""
        return " ".join(" ".join(self.words).split())

    @property
    def charts(self) -> dict[str, dict[str, Any]]:
        """The data of the charts by their id."""
        (found,) = (text for attributes, text in self.scripts if attributes.get("type") == "application/json")
        return {chart["id"]: chart for chart in json.loads(found)}

    def rows(self, chart: str) -> list[dict[str, Any]]:
        """What is drawn, and what can be downloaded."""
        found = self.charts[chart]
        return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def parsed(html: str) -> Parsed:
    """A page from its text."""
    page = Parsed()
    page.feed(html)
    page.close()
    return page


def report(path: Path, **options: Any) -> Parsed:
    """Write the report of a folder, and read it again."""
    return parsed(write(path, **options).read_text(encoding="utf-8"))
