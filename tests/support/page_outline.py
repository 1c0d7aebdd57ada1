"""What a page shows, without its numbers: tiles, charts with their words and marks, tables.

Two pages of one outline look alike; a test keeps the outline of each page."""

import re
from dataclasses import dataclass
from html import unescape

_NUMBER = re.compile(r"[\d.,eE%kM\u2212\u2013+-]*\d[\d.,eE%kM\u2212\u2013+-]*")
# Points, then lines and bars; ticks and grid are not clipped to the axes, or of no series.
_POINTS = re.compile(r'<g clip-path="[^"]*">(.*?)</g>', re.DOTALL)
_LINES = re.compile(r'<path [^>]*clip-path="[^"]*" style="[^"]*var\(--series-\d\)')


@dataclass(frozen=True)
class Picture:
    """One drawing: its caption, its words, both without numbers, and how many marks it has."""

    caption: str
    words: tuple[str, ...]
    num_marks: int


@dataclass(frozen=True)
class PageOutline:
    """The parts of a page that a reader sees, in their order."""

    verdicts: list[str]  # kinds: good, warn, bad or empty
    tiles: list[str]
    headings: list[str]
    legends: list[list[str]]
    pictures: list[Picture]
    folds: list[str]


def outline_page(page: str) -> PageOutline:
    """Return the outline of a page of the kit."""
    return PageOutline(
        verdicts=re.findall(r'<section class="verdict (\w*)"', page),
        tiles=_texts(r'<div class="tile"><dt>(.*?)</dt>', page),
        headings=_texts(r"<h2[^>]*>(.*?)</h2>", page),
        legends=[
            _texts(r"<li>(.*?)</li>", one)
            for one in re.findall(r'<ul class="legend">(.*?)</ul>', page, re.DOTALL)
        ],
        pictures=[
            Picture(
                _NUMBER.sub(
                    "#", _text(re.search(r"<figcaption>(.*?)(?:<small>|</figcap)", one, re.DOTALL))
                ),
                tuple(
                    word
                    for word in _texts(r"<text[^>]*>(.*?)</text>", one)
                    # Neither numbers nor dates: where ticks stand is matplotlib's matter.
                    if not re.fullmatch(r"\S*\d\S*", word)
                ),
                sum(found.count("<use ") for found in _POINTS.findall(one))
                + len(_LINES.findall(one)),
            )
            for one in re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
        ],
        folds=_texts(r"<summary[^>]*>(.*?)</summary>", page),
    )


def _texts(pattern: str, page: str) -> list[str]:
    return [_text(found) for found in re.finditer(pattern, page, re.DOTALL)]


def _text(found: re.Match[str] | None) -> str:
    assert found is not None
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", found[1])).split())
