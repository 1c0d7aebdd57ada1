"""Links of a page to files outside docs/: at `repo_url` on the site, or text where none is set."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page as the site shows it."""
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

    return LINK.sub(translate, markdown)
