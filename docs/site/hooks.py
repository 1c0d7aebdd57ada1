"""What differs between a page as it stands in the repository and as the site shows it."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page as the site shows it: links to files outside docs/ lead to `repo_url`, or are
    text where none is set; a page's name stands without `.md`."""
    source, docs = Path(page.file.abs_src_path), Path(config.docs_dir)

    def translate(link: re.Match[str]) -> str:
        text, path, anchor = link.groups(default="")
        target = (source.parent / path).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not config.repo_url:
            return text
        file = target.relative_to(docs.parent).as_posix()
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{file}{anchor})"

    text = "\n".join(_indent_lists(markdown.split("\n")))
    return re.sub(r"\[([\w-]+)\.md\]", r"[\1]", OUTSIDE.sub(translate, text))


def _indent_lists(lines: list[str]) -> Iterator[str]:
    """Yield the lines, those within an item of a list two spaces farther to the right, an item
    after a paragraph behind an empty line."""
    # Python's Markdown wants both, GitHub neither.
    in_fence = in_list = after_paragraph = False
    for previous, line in pairwise(["", *lines]):
        in_fence ^= line.startswith("```")
        if not line:
            after_paragraph = False
        elif line.startswith(" "):
            after_paragraph |= in_list and not previous
        else:
            is_item = not in_fence and bool(re.match(r"- |\d+\. ", line))
            if is_item and after_paragraph:
                yield ""
            in_list, after_paragraph = is_item, not is_item
        yield f"  {line}" if in_list and line.startswith(" ") else line
