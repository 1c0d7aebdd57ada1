"""What a plan is made for: the machines, and what of the data is stated. Without torch, so that
`gmeta plan` tells of a wrong option at once."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """What tables are placed on: ranks, all alike, and the memory of each, which only the planner
    asks for."""

    world_size: int
    ranks_per_host: int
    device: str  # "cpu" or "cuda"
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Speeds:
    """What one GPU does in a second: bytes of its memory, of its host's, to the GPUs of its host
    and to those of others, each way; and floating-point operations."""

    hbm: float
    pcie: float
    nvlink: float
    network: float
    flops: float


@dataclass(frozen=True)
class CapacityOverrides:
    """What is stated where the dataset does not say it: rows of tables, rows of a task (support and
    query), and the distinct share of the ids that a rank's rows have of a table; 0: as measured."""

    rows: Mapping[str, int]
    rows_per_task: float = 0.0
    unique_share: float = 0.0
