"""Messages over TCP."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gmeta.distributed.transport.transport import Transport


def test_numbers_of_the_host_are_added_where_the_jobs_own_group_is_of_gpus_alone() -> None:
    # As with NCCL: every step's counts are such numbers.
    control: Any = SimpleNamespace(size=lambda: 2)
    values = torch.tensor([3, 4])
    with mock.patch.object(dist, "all_reduce") as added:
        Transport(control, control).add(values)
    added.assert_called_once_with(values, group=control, async_op=True)
