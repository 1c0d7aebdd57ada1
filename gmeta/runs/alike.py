"""Checks that all ranks of a run have the same config and data."""

from collections.abc import Mapping
from typing import Any

from gmeta.config.train_config import TrainConfig
from gmeta.distributed.ranks import Ranks, broadcast_value, gather_values
from gmeta.errors import UserError

# What may differ from one machine to the next: where the data is, and who reads it.
OF_ONE_MACHINE = ("data.path", "data.service", "data.threads", "data.processes")


# Ranks that people start by hand may differ: they would train a model that no one configured, or
# wait for each other for ever.
def settings_of_all(config: TrainConfig) -> dict[str, Any]:
    """Return the config's values by section.key, without those that are a machine's own."""
    return {key: value for key, value in config.by_key().items() if key not in OF_ONE_MACHINE}


def check_alike(told: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise UserError on all ranks, with the keys that differ from rank 0's. Collective."""
    everyone = gather_values(dict(told), ranks) or []
    problem = ""
    for rank, other in enumerate(everyone):
        if other != everyone[0] and not problem:
            differing = ", ".join(
                f"{key} = {other.get(key)!r} (rank 0: {value!r})"
                for key, value in everyone[0].items()
                if other.get(key) != value
            )
            problem = (
                f"rank {rank} has {differing}: all ranks of a run need the same. Start every rank "
                "with the same command, config and data"
            )
    problem = broadcast_value(problem, ranks)
    if problem:
        raise UserError(problem)
