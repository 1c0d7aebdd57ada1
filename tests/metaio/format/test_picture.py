"""The picture of a dataset: a table looks alike in all splits."""

import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from metaio.format.inspection import SplitSummary, TableUsage
from metaio.format.inspection_chart import _choose_largest_tables, _draw_skew


def split(name: str, **uses: list[int]) -> SplitSummary:
    """A split of two tasks; each table with how often its ids occur."""
    tables = tuple(TableUsage(table, len(used), np.array(used)) for table, used in uses.items())
    sizes = np.array([3, 4])
    return SplitSummary(name, 2, sizes, sizes, (), tables)


def test_a_table_has_one_colour_in_all_splits_and_starts_at_the_origin() -> None:
    many = list(range(40))
    splits = [
        split("train", shop=[0, 3, 1], item=many, city=[0, 9]),
        split("item-cold", shop=[0, 3, 1], item=[0, 7], city=[0, 9]),
    ]
    tables = _choose_largest_tables(splits)
    assert tables == ["item", "shop"]  # the city is always the same: no curve
    lines = []
    for summary, axes in zip(splits, Figure().subplots(2), strict=True):
        _draw_skew(axes, summary, tables)
        lines.append({str(line.get_label()): line for line in axes.lines})
    train, cold = lines
    assert (set(train), set(cold)) == ({"item", "shop"}, {"shop"})
    assert to_hex(train["shop"].get_color()) == to_hex(cold["shop"].get_color())
    assert to_hex(train["shop"].get_color()) != to_hex(train["item"].get_color())
    # Two ids: the more used one has three of four uses.
    assert train["shop"].get_xydata().tolist() == [[0, 0], [50, 75], [100, 100]]
    assert (train["shop"].get_marker(), train["item"].get_marker()) == (".", "")
