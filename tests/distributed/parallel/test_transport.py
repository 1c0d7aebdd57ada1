"""Messages over TCP."""

import torch
import torch.distributed as dist

from gmeta.distributed.transport.transport import GlooTransport


def test_numbers_of_the_host_are_added_where_the_jobs_own_group_is_of_gpus_alone() -> None:
    # As with NCCL: every step's counts are such numbers.
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows, control = (dist.new_group(backend="gloo") for _ in range(2))
        values = torch.tensor([3, 4])
        GlooTransport(rows, control).add(values).wait()
        assert values.tolist() == [3, 4]
    finally:
        dist.destroy_process_group()
