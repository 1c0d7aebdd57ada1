"""The style sheet of all pages, and pages with a script of their own."""

from importlib import resources

from gmeta.platform.pages.palette import write_css_colors


def read_style() -> str:
    """Return the style sheet of all pages, its colours first."""
    return write_css_colors() + resources.files(__package__).joinpath("kit.css").read_text()


def read_scripted_page(package: str) -> str:
    """Return the page.html of a package, with the style sheet in the place of `KIT`."""
    page = resources.files(package).joinpath("page.html").read_text()
    return page.replace("KIT", read_style(), 1)
