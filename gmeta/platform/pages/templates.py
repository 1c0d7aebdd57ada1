"""Pages of templates. The data-shard service has none: its image is without jinja2."""

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from gmeta.platform.pages.page_kit import read_style
from gmeta.platform.pages.palette import MARKS


def load_template(
    package: str, name: str, filters: Mapping[str, Callable[..., Any]] | None = None
) -> Template:
    """Return a template of a package, which may extend base.html and use tiles of kit.html."""
    # Names are the user's words, so they are escaped; a name that the template misspells fails.
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader(str(__package__), ".")])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Ours, so the style needs no escaping.
    environment.globals.update(style=Markup(read_style()), marks=MARKS)
    environment.filters.update(filters or {})
    return environment.get_template(name)
