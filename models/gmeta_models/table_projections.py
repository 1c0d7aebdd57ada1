"""Rows of tables as a model takes them: those of narrow tables projected to its width
(mixed-dimension embeddings), and rare ones replaced by a vector that they share.

Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation
Systems", ISIT 2021 (arXiv 1909.11810), section 3: e = P r for a row r, without a bias.

Shape suffixes: U unique ids, D embedding width, B tables"""

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class TableProjections(nn.Module):
    """A linear layer for each narrow table, from its width W to D, or zeros for one that is left
    out; tables of the model's width stay as they are.

    `width_of` are the widths of all tables in their order, by names that modules may have. The
    tables `of_events` are left out of the model alone (`hide_UD`): an encoder of events reads
    them. With `shares`, a row of zeros stands for the vector that rare rows of its table share."""

    shared_BD: nn.Parameter | None

    def __init__(
        self,
        width_of: Mapping[str, int],
        dim: int,
        left_out: Collection[str] = (),
        of_events: Collection[str] = (),
        shares: bool = False,
    ) -> None:
        super().__init__()
        self.hidden = tuple(
            place for place, name in enumerate(width_of) if name in left_out and name in of_events
        )
        left_out = set(left_out).difference(of_events)
        self._names, self._left_out, self._dim = tuple(width_of), left_out, dim
        self._widths = tuple(width_of.values())
        self.narrow = tuple(
            place
            for place, (name, width) in enumerate(width_of.items())
            if width < dim or name in left_out
        )
        narrow = {n: width for n, width in width_of.items() if width < dim and n not in left_out}
        self.layers = nn.ModuleDict(
            {name: nn.Linear(width, dim, bias=False) for name, width in narrow.items()}
        )
        for layer in self.layers.values():
            weight = cast(nn.Linear, layer).weight
            # The variance 1 / W: projected rows vary as those of a wide table do.
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        self.shared_BD = nn.Parameter(torch.zeros(len(width_of), dim)) if shares else None

    @property
    def is_identity(self) -> bool:
        """Return whether a model takes the rows as they are."""
        return not self.narrow and self.shared_BD is None

    def of_table(self, place: int, rows_UD: Tensor) -> Tensor:
        """Return rows of one table, as a model takes them: [U, D]."""
        if self.shared_BD is not None:
            width = self._widths[place]
            rows_UD = self.share_UD(rows_UD[:, :width], self.shared_BD[place, :width])
        return self.project(place, rows_UD)

    def share_UD(self, rows_UD: Tensor, shared_UD: Tensor) -> Tensor:
        """Return the rows; in place of zeros, the vector that rare rows of their table share."""
        # A row of zeros has no gradient, so that it stays one until an update admits it.
        return torch.where((rows_UD == 0).all(dim=1, keepdim=True), shared_UD, rows_UD)

    def project(self, place: int, rows_UD: Tensor) -> Tensor:
        """Return rows of one table, none of which is shared, as a model takes them: [U, D]."""
        name = self._names[place]
        if name in self._left_out:
            # By a product: the rows still send their gradients of 0.
            return (rows_UD[:, :1] * 0.0).expand(-1, self._dim)
        if name not in self.layers:
            return rows_UD
        layer = cast(nn.Linear, self.layers[name])
        # Behind a narrow table's own values the rows hold anything.
        projected_UD: Tensor = layer(rows_UD[:, : layer.in_features])
        return projected_UD

    def forward(self, rows_UD: Tensor, rows_of_tables: Sequence[int]) -> Tensor:
        """Return the rows of all tables, which stand table by table, as a model takes them."""
        if self.is_identity:
            return rows_UD
        parts = rows_UD.split(list(rows_of_tables))
        return torch.cat([self.of_table(place, part) for place, part in enumerate(parts)])

    def hide_UD(self, rows_UD: Tensor, lengths_B: Tensor) -> Tensor:
        """Return the rows, `lengths_B` of each table, as the model takes them: zeros where events
        alone read a table."""
        if not self.hidden:
            return rows_UD
        # On the device: the lengths of a CUDA graph's batches differ, their sum does not.
        end_B, place_U = lengths_B.cumsum(0), torch.arange(len(rows_UD), device=rows_UD.device)
        table_U = torch.searchsorted(end_B, place_U, right=True)
        is_hidden_U = sum((table_U == table for table in self.hidden), torch.zeros_like(table_U))
        return rows_UD.masked_fill(is_hidden_U.bool().unsqueeze(1), 0.0)


def pad_width_UD(rows_UD: Tensor, width: int) -> Tensor:
    """Return rows of a table with zeros behind them, up to this width."""
    return rows_UD if rows_UD.shape[1] == width else pad(rows_UD, (0, width - rows_UD.shape[1]))
