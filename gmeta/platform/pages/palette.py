"""The colours and markers of pages and pictures."""

# name -> (light, dark). Series: Okabe & Ito's colours for the colour-blind, darkened or lightened
# to a contrast of 3:1 on the page (WCAG 2.1, 1.4.11); words have 4.5:1 on the page and on panels.
PALETTE = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "page": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#151b23"),
    "idle": ("#c9d1d8", "#3d444e"),
    "good": ("#116329", "#56d364"),
    "warn": ("#8f4a00", "#f0b35a"),
    "bad": ("#b3261e", "#ff8a80"),
    "series-0": ("#0072b2", "#56b4e9"),
    "series-1": ("#c75300", "#f0964b"),
    "series-2": ("#00875f", "#3fc99a"),
    "series-3": ("#a8508a", "#dd8fbf"),
}
NUM_SERIES_COLORS = 4

# The markers as SVG paths in a box of 12 by 12, for the legend, by matplotlib's names.
MARKS = {
    "o": "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z",
    "s": "M-4 -4H4V4H-4Z",
    "^": "M0 -4L4.5 4H-4.5Z",
    "D": "M0 -5L5 0L0 5L-5 0Z",
}


def write_css_colors() -> str:
    """Return the palette as CSS variables, `--ink` and so on, by the reader's theme."""
    light, dark = (
        "".join(f"--{name}:{both[theme]};" for name, both in PALETTE.items()) for theme in (0, 1)
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
