"""A task's events in a program: its support rows in time, read by the model's encoder.

Shape suffixes: T tasks, N rows, S support rows, Q query rows, H longest list or task, F single-id
or pooled features, M multi-id features, K dense columns, D embedding width, U unique ids, X all
inputs side by side"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gmeta.data.event_layout import EventColumns
from gmeta.serving.formats.program_rows import DENSE, IDS, SUPPORT, ColumnKeys, KeyedTables
from gmeta_models.sequence.encoder import EventEncoder, EventLayout, EventRectangle, EventVectors
from gmeta_models.sequence.sim import SIM
from metaio.format.features import Features

if TYPE_CHECKING:
    from gmeta.serving.served_model import ServedModel

TIMES = "event_times"


class EventInputs(nn.Module):
    """The inputs that rows of one task have of its events."""

    def __init__(
        self,
        encoder: EventEncoder,
        columns: EventColumns,
        features: Features,
        keys: ColumnKeys,
        tables: KeyedTables,
    ) -> None:
        super().__init__()
        self.encoder, self.keys, self.tables = encoder, keys, tables
        self._columns = columns
        self._delay = features.event_delay
        self._dense = [features.dense.index(name) for name in features.event_dense]
        # A search among as few events as it finds at most takes all: so many that are not known
        # stand behind them, as a program has no branches.
        self._spare = encoder.newest if isinstance(encoder, SIM) and encoder.by_hash else 0

    @classmethod
    def of(cls, served: "ServedModel", keys: ColumnKeys, tables: KeyedTables) -> Self | None:
        """Return those of a model; None where it reads no events."""
        encoder, columns = served.learner.events, served.learner.event_columns
        if encoder is None or columns is None:
            return None
        return cls(encoder, columns, served.config.features, keys, tables)

    def forward(
        self, inputs: Mapping[str, Tensor], key_QF: Tensor, with_support: bool = False
    ) -> Tensor:
        """Return the inputs [Q, X] of query rows with these keys, which know all events; or [S + Q,
        X] of the support rows and theirs.

        Of the support rows `ids`, `dense` and `event_times` [S, 2] are read: seconds, and above 0
        where the row is an event."""
        ids_SF, times_S, is_event_S = inputs[SUPPORT + IDS], *inputs[SUPPORT + TIMES].unbind(1)
        # A time that is none makes the row one that no table has.
        key_SF = torch.where(
            times_S.isfinite().unsqueeze(1), self.keys.of_single(ids_SF), self.keys.no_key
        )
        # Events in time, equal times as they come; the other rows stand behind them.
        event_time_S = times_S.masked_fill(~(is_event_S > 0), math.inf)
        row_H = _order_stably(event_time_S)
        time_H = event_time_S[row_H]
        is_event_H = time_H < math.inf
        seconds_H1 = torch.where(is_event_H, time_H - time_H[0], 0.0).float().unsqueeze(1)
        numbers_HK = seconds_H1
        if self._dense:
            dense_HK = inputs[SUPPORT + DENSE][row_H][:, self._dense]
            numbers_HK = torch.cat([seconds_H1, dense_HK], dim=1)
        before_N, key_NF = is_event_H.sum().expand(key_QF.shape[0]), key_QF
        if with_support:
            before_S = torch.searchsorted(time_H, times_S - self._delay)
            before_N, key_NF = torch.cat([before_S, before_N]), torch.cat([key_SF, key_QF])
        target = list(self._columns.target)
        return self._encode(key_SF[row_H][:, target], numbers_HK, key_NF[:, target], before_N)

    def _encode(
        self, key_HM: Tensor, numbers_HK: Tensor, key_NM: Tensor, before_N: Tensor
    ) -> Tensor:
        keys = key_HM, key_NM
        rows_UD = torch.cat([self.tables(key, for_events=True).flatten(0, 1) for key in keys])
        place_U = torch.arange(rows_UD.shape[0], device=rows_UD.device)
        place_HM = place_U[: key_HM.numel()].view(key_HM.shape)
        place_NM = place_U[key_HM.numel() :].view(key_NM.shape)
        row_N = torch.arange(key_NM.shape[0], device=rows_UD.device)
        if self._columns.category >= 0:
            found_NH, before_N = self._search(key_HM, key_NM, before_N)
            # Each row is a task of its own, with the events that are found for it.
            rectangle = EventRectangle(
                place_HM[found_NH], numbers_HK[found_NH], before_N, row_N.unsqueeze(1),
                before_N.unsqueeze(1),
            )  # fmt: skip
        else:
            spare = (0, 0, 0, self._spare)
            rectangle = EventRectangle(
                pad(place_HM, spare).unsqueeze(0), pad(numbers_HK, spare).unsqueeze(0),
                before_N[-1:], row_N.unsqueeze(0), before_N.unsqueeze(0),
            )  # fmt: skip
        none = row_N[:0], numbers_HK[:0, 0]
        vectors: EventVectors = self.encoder(
            EventLayout((rectangle,), row_N, place_NM, *none), rows_UD
        )
        return vectors.inputs_NX()

    def _search(self, key_HM: Tensor, key_NM: Tensor, before_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return all events in an order for each row [N, H], those of its target's category that it
        knows first, and how many these are, the newest alone."""
        category = self._columns.category
        places_H = torch.arange(key_HM.shape[0], device=key_HM.device)
        of_category_NH = key_HM[:, category] == key_NM[:, category].unsqueeze(1)
        is_found_NH = (of_category_NH & (places_H < before_N.unsqueeze(1))).long()
        number_N1 = is_found_NH.sum(dim=1, keepdim=True)
        # Behind it stand as many of the found ones as are newer.
        is_newest_NH = number_N1 - is_found_NH.cumsum(dim=1) < self._columns.newest
        is_found_NH = is_found_NH * is_newest_NH
        order_NH = (places_H - (places_H[-1] + 1) * is_found_NH).sort(dim=1).indices
        return order_NH, is_found_NH.sum(dim=1)


def _order_stably(values_H: Tensor) -> Tensor:
    """Return the order of ascending values, equal ones as they stand."""
    # ONNX has no stable sort: the second one is of numbers that are all different.
    sorted_H, order_H = values_H.sort()
    places_H = torch.arange(values_H.shape[0], device=values_H.device)
    rank_H = (sorted_H != sorted_H[(places_H - 1).clamp(min=0)]).long().cumsum(0)
    return (rank_H * (places_H[-1] + 1) + order_H).sort().values % (places_H[-1] + 1)
