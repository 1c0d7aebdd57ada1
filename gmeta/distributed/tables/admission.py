"""When a row of a table has a vector of its own: once enough steps have asked for it.

Until then it is zeros, in whose place all ranks read the vector that such rows of its table share
(TableProjections): so it has no gradient, and travels, is stored and is exported as any other.

Shape suffixes: U unique ids, R rows of tables, D embedding width, B tables"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from gmeta.distributed.tables.plain_tables import LAST_STEP, STEPS_ASKED
from gmeta.distributed.tables.updates import FastGroup


class TableShare(NamedTuple):
    """What the rows of a table, or of a part of one, share."""

    vector: Tensor  # all ranks learn it as they learn layers
    has_row_0: bool  # of values that are not known, which never has a vector of its own


@final
class RowAdmission:
    """Counts the steps that ask for rows of a group, by `model.admission`; all that it knows is
    state of the optimizer, so that checkpoints, caches and growing tables keep it."""

    def __init__(self, group: FastGroup, shares: Sequence[TableShare]) -> None:
        self._group, self._shares = group, shares
        firsts, device = group.tables.first_row_of_table, group.rows.values_RD.device
        self._first_B = torch.tensor(firsts, device=device)
        zero_rows = [
            first if share.has_row_0 else -1 for first, share in zip(firsts, shares, strict=True)
        ]
        self._row_0_B = torch.tensor(zero_rows, device=device)

    def record_step(self, row_U: Tensor, number_U: Tensor) -> None:
        """Count one step for these rows, whose numbers among those of all tables are `number_U`;
        those that have been asked for often enough become copies of what they share so far."""
        group, (after, expires) = self._group, self._group.tables.admission
        if expires:
            self._forget_old_rows(row_U, expires)
        asked_U1 = group.state[STEPS_ASKED].copy_rows(row_U).add_(1)
        group.state[STEPS_ASKED].write(row_U, asked_U1)
        rows_UD = group.rows.copy_rows(row_U)
        table_U = torch.searchsorted(self._first_B, number_U, right=True) - 1
        is_row_0_U = self._row_0_B.index_select(0, table_U) == number_U
        is_rare_U1 = (rows_UD == 0).all(dim=1, keepdim=True)
        is_new_U1 = is_rare_U1 & (asked_U1 >= after) & ~is_row_0_U.unsqueeze(1)
        shared_BD = torch.stack([share.vector.detach()[: group.width] for share in self._shares])
        group.rows.write(row_U, torch.where(is_new_U1, shared_BD.index_select(0, table_U), rows_UD))

    def _forget_old_rows(self, row_U: Tensor, expires: int) -> None:
        """Have rows that no step has asked for in so many begin anew, and note this step."""
        group, step = self._group, self._group.tables.steps_done + 1
        last_step = group.state[LAST_STEP]
        last_U1 = last_step.copy_rows(row_U)
        is_old_U1 = (last_U1 > 0) & (last_U1 < step - expires)
        for store in group.stores:
            store.write(row_U, store.copy_rows(row_U).masked_fill_(is_old_U1, 0.0))
        last_step.write(row_U, torch.full_like(last_U1, step))
