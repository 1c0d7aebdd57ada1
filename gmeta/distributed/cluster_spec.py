"""What a plan is made for: the machines, and what the command line says of the data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cluster:
    """Where tables are placed: ranks, all alike, and the memory of each, for the planner alone."""

    world_size: int
    ranks_per_host: int
    device: str  # "cpu" or "cuda"
    device_bytes: int = 0
    host_bytes: int = 0

    def group_of(self, num_groups: int) -> "Cluster":
        """Return one of so many equal groups of the ranks."""
        size = self.world_size // num_groups
        return replace(self, world_size=size, ranks_per_host=min(self.ranks_per_host, size))


@dataclass(frozen=True)
class Speeds:
    """One GPU in a second: bytes of its memory, of its host's, to the GPUs of its host and to those
    of others, each way; and floating-point operations."""

    hbm: float
    pcie: float
    nvlink: float
    network: float
    flops: float


@dataclass(frozen=True)
class CapacityOverrides:
    """Values in place of the dataset's: rows of tables, rows of a task (support and query), and the
    distinct share of a table's ids among a rank's rows; 0: as measured."""

    rows: Mapping[str, int]
    rows_per_task: float = 0.0
    unique_share: float = 0.0
