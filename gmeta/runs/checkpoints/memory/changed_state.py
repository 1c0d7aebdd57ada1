"""What a rank's steps change, as bytes and back: rows of tables with their optimizer's state, and
the layers with theirs.

Shape suffixes: R rows of tables, U unique ids, D embedding width, G groups of tables"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer

from gmeta.distributed.exchange.wire import WireExchange
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.runs.checkpoints.loader import TABLE_KEYS, collect_state, initialise_optimizer_state
from gmeta.runs.checkpoints.memory.memory_log import Bytes


class _Body:
    """Reads a body from front to back: a text, the rows of all groups, their values, the layers."""

    def __init__(self, body: Bytes) -> None:
        self._rest = torch.from_numpy(body)
        length = int(self.take((1,), torch.int64))
        self.about: dict[str, Any] = json.loads(self._cut(length).numpy().tobytes())
        self.rows_GU = [self.take((count,), torch.int64) for count in self.about["rows"]]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor."""
        # A clone begins at an even address, as a view as other numbers must.
        values = self._cut(int(np.prod(shape)) * dtype.itemsize).clone()
        return values.view(dtype).view(tuple(shape))

    def _cut(self, num_bytes: int) -> Tensor:
        cut, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return cut


def read_about(body: Bytes) -> dict[str, Any]:
    """Return what `to_bytes` was told about."""
    return _Body(body).about


@final
class ChangedState:
    """The state of one rank as far as steps change it."""

    def __init__(self, sharded: DistributedLearner, optimizer: CombinedOptimizer) -> None:
        """Take note, from now on, of the rows that steps change."""
        self._sharded, self._optimizer = sharded, optimizer
        exchange = sharded.local.exchange
        assert isinstance(exchange, WireExchange)  # check_memory_checkpoints
        self._groups = exchange.groups
        # A byte for each row of the tables: 1 where it changed since `take_rows`.
        self._changed_GR = [
            torch.zeros(len(group.rows.values_RD), dtype=torch.bool, device=exchange.ranks.device)
            for group in self._groups
        ]
        for group, changed_R in zip(self._groups, self._changed_GR, strict=True):
            group.on_update = partial(changed_R.index_fill_, 0, value=True)

    def take_rows(self) -> list[Tensor]:
        """Return the rows of each group that changed since the last call, on the host."""
        rows_GU = [changed_R.nonzero().view(-1).cpu() for changed_R in self._changed_GR]
        for changed_R in self._changed_GR:
            changed_R.zero_()
        return rows_GU

    @torch.no_grad()
    def to_bytes(self, about: Mapping[str, Any], rows_GU: Sequence[Tensor]) -> list[Bytes]:
        """Return these rows and the layers as they are now, behind `about`, to be joined."""
        layers = self._layers()
        counts = [rows_U.numel() for rows_U in rows_GU]
        text = json.dumps({**about, "rows": counts, "layers": list(layers)}).encode()
        values = (
            store.copy_rows(rows_U.to(store.values_RD.device))
            for group, rows_U in zip(self._groups, rows_GU, strict=True)
            for store in group.stores
        )
        tensors = [torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
        return [
            one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            for one in (*tensors, *rows_GU, *values, *layers.values())
        ]

    @torch.no_grad()
    def fill(self, bodies: Sequence[Bytes]) -> None:
        """Set rows and layers to what `to_bytes` returned, each body behind the one before."""
        for each in bodies:
            body = _Body(each)
            for group, rows_U in zip(self._groups, body.rows_GU, strict=True):
                for store in group.stores:
                    to, shape = store.values_RD, (rows_U.numel(), store.width)
                    values_UD = body.take(shape, to.dtype)
                    store.write(rows_U.to(to.device), values_UD.to(to.device))
        # The newest alone has layers of use.
        if not any(name.startswith("optimizer.") for name in self._layers()):
            initialise_optimizer_state(self._optimizer)
        layers = self._layers()
        for name in body.about["layers"]:
            layers[name].copy_(body.take(layers[name].shape, layers[name].dtype))
        self._sharded.load_state_dict(self._sharded.state_dict())  # notifies the modules
        self._optimizer.load_state_dict(self._optimizer.state_dict())

    def _layers(self) -> dict[str, Tensor]:
        """Return all that every rank has alike and that steps change, by name."""
        state = collect_state(self._sharded, self._optimizer)
        kept = state.get("optimizer", {}).get("state", {})
        named = {f"model.{name}": value for name, value in state["model"].items()} | {
            f"optimizer.state.{name}.{key}": value
            for name, values in kept.items()
            for key, value in values.items()
        }
        return {name: one for name, one in named.items() if not name.startswith(TABLE_KEYS)}


def join_rows(bodies: Sequence[Bytes], rows_GU: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of each group in these bodies and in `rows_GU`, each once."""
    found = [*(_Body(body).rows_GU for body in bodies), rows_GU]
    return [torch.cat(of_group).unique() for of_group in zip(*found, strict=True)]
