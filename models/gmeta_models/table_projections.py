"""Projections of narrow tables to the width that a model takes: mixed-dimension embeddings.

Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation
Systems", ISIT 2021 (arXiv 1909.11810), section 3: e = P r for a row r, without a bias.

Shape suffixes: U fetched rows of all tables, B tables, D the model's width, W a table's own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class TableProjections(nn.Module):
    """A matrix [W, D] for each narrow table; the tables of the model's width stay as they are.

    `width_of` are the widths of all tables by name, in their order. A matrix starts with values of
    the variance 1 / W: its rows then vary as those of a wide table do.
    """

    def __init__(self, width_of: Mapping[str, int], dim: int) -> None:
        super().__init__()
        self._names = tuple(width_of)
        self.weights = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(width, dim) / width**0.5)
                for name, width in width_of.items()
                if width < dim
            }
        )

    def of_table(self, place: int, rows_UD: Tensor) -> Tensor:
        """Return rows of one table, as a model takes them: [U, D]; behind a narrow table's own
        values they hold anything.
        """
        name = self._names[place]
        if name not in self.weights:
            return rows_UD
        weight_WD: Tensor = self.weights[name]
        return rows_UD[:, : len(weight_WD)] @ weight_WD.to(rows_UD.dtype)

    def forward(self, rows_UD: Tensor, rows_of_tables: Sequence[int]) -> Tensor:
        """Return the rows of all tables, which stand table by table, as a model takes them."""
        if not self.weights:
            return rows_UD
        parts = rows_UD.split(list(rows_of_tables))
        return torch.cat([self.of_table(place, part) for place, part in enumerate(parts)])


def filled_UD(rows_UD: Tensor, width: int) -> Tensor:
    """Return rows of a table with zeros behind them, up to this width."""
    return rows_UD if rows_UD.shape[1] == width else pad(rows_UD, (0, width - rows_UD.shape[1]))
