"""Tables beyond a pretended GPU, against the same tables on it."""

import os
import threading
from typing import Any
from unittest.mock import patch

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from gmeta.distributed.tables import cached_group
from gmeta.distributed.tables.cached_group import CachedGroup
from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.distributed.tables.row_mover import DeviceMover, RowMover
from gmeta.distributed.tables.rows_to_send import RowsToSend
from gmeta.distributed.tables.table_storage import TableStorage
from tests.distributed.tables.test_beyond_memory import NUM_SLOTS, STEPS, Run, differences
from tests.pretended import device
from tests.pretended.device import CUDA, Counts, PretendedDevice, counting, held
from tests.pretended.tables import stand_in
from tests.pretended.training import ranks_on

# Of the second rare rows share a vector, and some begin anew.
OPTIMIZERS: dict[str, dict[str, Any]] = {"rowwise_adagrad": {}, "adam": {"admission": (2, 3)}}
PLACEMENTS = ("device", "host", "file")
LONG_S = 0.5  # for a thread to do what it must not


def everything(folder: str) -> dict[str, Any]:
    """Return what differs of losses, rows and states, and what each placement asked for: in the
    thread that trains, and beside it."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    stand_in()
    found: dict[str, Any] = {"differences": [], "asked": {}, "beside": {}, "moved": {}}
    with PretendedDevice():
        found["captured"] = _captured_beside_a_copy()
        found["flushed"] = _flushed_beside_an_admission(folder)
        cached_group.MIN_SLOTS = NUM_SLOTS[1]
        ranks = ranks_on(CUDA)
        for optimizer, more in OPTIMIZERS.items():
            runs = {place: Run(ranks, folder, place, optimizer, **more) for place in PLACEMENTS}
            losses = {}
            for place, run in runs.items():
                device._BESIDE = beside = Counts()
                with counting() as asked:
                    losses[place] = run.train(range(STEPS))
                if (ahead := run.sharded.local.exchange.ahead) is not None:
                    ahead.shutdown()  # behind the steps without a task, which nothing waits for
                found["asked"][place] = [one for one in asked.waits if "gmeta/distributed" in one]
                found["beside"][place] = [
                    len(beside.to_device), len(beside.to_host), len(beside.pageable)
                ]  # fmt: skip
            of_device = _on_host(runs["device"].state())
            for place in PLACEMENTS[1:]:
                if losses[place] != losses["device"]:
                    found["differences"].append(f"{optimizer}, {place}: losses")
                own = _on_host(runs[place].state())
                found["differences"] += differences(own, of_device, f"{optimizer}, {place}")
                (group,) = runs[place].sharded.local.exchange.groups
                slots = group.slots
                found["moved"][place] = [slots.num_asked, slots.num_found, group.num_slots]
    return found


def _captured_beside_a_copy() -> list[float]:
    """Return what a graph's replay adds to, and what another thread added to during its capture."""
    computed, copied = torch.zeros(1, device=CUDA), torch.zeros(1, device=CUDA)

    def copy() -> None:
        torch.cuda.set_device(CUDA)
        copied.add_(1)
        copied.to("cpu")  # as CUDA allows beside the capture of another thread

    graph, other = torch.cuda.CUDAGraph(), threading.Thread(target=copy, name="rows")
    with torch.cuda.graph(graph):
        computed.add_(1)
        other.start()
        other.join()
    graph.replay()
    return [held(computed).item(), held(copied).item()]


def _flushed_beside_an_admission(folder: str) -> list[float]:
    """Return rows in the host's memory behind a flush, in whose middle another thread begins to
    push these rows out of the cache. Each was -1 in the cache."""
    cached_group.MIN_SLOTS = 4
    spec, storage = (12, 1, None, None), TableStorage("host", folder, 0.01)
    sgd = EmbOptimType.EXACT_SGD
    tables = PlainTables([spec], sgd, CUDA, learning_rate=1.0, storage=storage)
    group = CachedGroup(tables)
    mover = DeviceMover([group], CUDA)

    def admit(*rows: int) -> RowsToSend:
        torch.cuda.set_device(CUDA)
        (there,) = mover.admit([group], [RowsToSend(torch.tensor(rows), None)], lambda: True)
        return there

    group.update(admit(0, 1, 2, 3), torch.ones(4, 1, device=CUDA))
    mover.settle()
    other = threading.Thread(target=admit, args=(4, 5, 6, 7), name="rows")
    flush = RowMover.flush

    def flush_late(self: RowMover) -> None:
        other.start()
        other.join(LONG_S)
        flush(self)

    with patch.object(RowMover, "flush", flush_late):  # behind the rows on their way out
        mover.flush()
    found: list[float] = tables.values_RD[:4, 0].tolist()
    other.join()
    return found


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: held(value) for name, value in state.items()}
