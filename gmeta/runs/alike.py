"""Ranks that people start by hand may have been told different things: they would train a
model that nobody asked for, or wait for each other for ever.
"""

from collections.abc import Mapping
from typing import Any

from gmeta.distributed.ranks import Ranks, broadcast_value, gather_values
from gmeta.errors import UserError

# What may differ from one machine to the next: where the data is, and who reads it.
OF_ONE_MACHINE = ("data.path", "data.service", "data.threads", "data.processes")


def settings_of_all(by_key: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values by section.key without those that are a machine's own."""
    return {key: value for key, value in by_key.items() if key not in OF_ONE_MACHINE}


def check_alike(told: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise UserError on all ranks, with the keys that differ, where one was told something else
    than rank 0. Collective."""
    everyone = gather_values(dict(told), ranks) or []
    problem = ""
    for rank, other in enumerate(everyone):
        if other != everyone[0] and not problem:
            differing = ", ".join(
                f"{key} = {other.get(key)!r} (rank 0: {everyone[0].get(key)!r})"
                for key in {**everyone[0], **other}
                if other.get(key) != everyone[0].get(key)
            )
            problem = (
                f"rank {rank} has {differing}: all ranks of a run need the same. Start every rank "
                "with the same command, config and data"
            )
    problem = broadcast_value(problem, ranks)
    if problem:
        raise UserError(problem)
