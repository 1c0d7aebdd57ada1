"""Tables beyond a pretended GPU, against the same tables on it."""

import os
from typing import Any

import torch

from gmeta.distributed.tables import cached_group
from tests.distributed.tables.test_beyond_memory import NUM_SLOTS, STEPS, Run, differences
from tests.pretended import device
from tests.pretended.device import CUDA, Counts, PretendedDevice, counting, held
from tests.pretended.tables import stand_in
from tests.pretended.training import ranks_on

OPTIMIZERS = ("rowwise_adagrad", "adam")
PLACEMENTS = ("device", "host", "file")


def everything(folder: str) -> dict[str, Any]:
    """Return what differs of losses, rows and states, and what each placement asked for: in the
    thread that trains, and beside it."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    stand_in()
    cached_group.MIN_SLOTS = NUM_SLOTS[1]
    found: dict[str, Any] = {"differences": [], "asked": {}, "beside": {}, "moved": {}}
    with PretendedDevice():
        ranks = ranks_on(CUDA)
        for optimizer in OPTIMIZERS:
            runs = {place: Run(ranks, folder, place, optimizer) for place in PLACEMENTS}
            losses = {}
            for place, run in runs.items():
                device._BESIDE = beside = Counts()
                with counting() as asked:
                    losses[place] = run.train(range(STEPS))
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


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: held(value) for name, value in state.items()}
