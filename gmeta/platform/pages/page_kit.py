"""Makes pages that load nothing from the network: of templates, or of a file with a script."""

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from gmeta.platform.pages.palette import MARKS, write_css_colors


def read_style() -> str:
    """Return the style sheet of all pages, its colours first."""
    return write_css_colors() + resources.files(__package__).joinpath("kit.css").read_text()


def read_scripted_page(package: str) -> str:
    """Return the page.html of a package, with the style sheet in the place of `KIT`."""
    page = resources.files(package).joinpath("page.html").read_text()
    return page.replace("KIT", read_style(), 1)


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
