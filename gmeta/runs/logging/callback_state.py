"""What callbacks log between two readings, and what checkpoints keep of them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmeta.distributed.ranks import Ranks, broadcast_value, gather_values
from gmeta.errors import GMetaError
from gmeta.platform.files.checked_json import read_json
from gmeta.runs.logging.callback import Run

CALLBACKS_FILE = "callbacks.json"  # of a checkpoint


def gather_logged(run: Run, values: Mapping[str, Any], ranks: Ranks) -> dict[str, float | None]:
    """Return the mean over ranks and calls of each value that callbacks logged since the last time,
    None where it is not finite. Collective. Raises GMetaError: a name of `values` was logged."""
    sums = {name: (sum(map(float, mine)), len(mine)) for name, mine in run.logged.items()}
    run.logged.clear()
    # By name: a rank may log what another has no occasion to.
    everyone = broadcast_value(gather_values(sums, ranks), ranks) or []
    found: dict[str, float | None] = {}
    for name in sorted({name for mine in everyone for name in mine}):
        if name in values:
            raise GMetaError(
                f"a callback logs {name!r}, which every reading has already. Log it by another name"
            )
        parts = [mine[name] for mine in everyone if name in mine]
        mean = sum(total for total, _ in parts) / sum(count for _, count in parts)
        found[name] = mean if math.isfinite(mean) else None
    return found


def format_callbacks(run: Run, states: Mapping[str, Any], ranks: Ranks) -> dict[str, str]:
    """Return the file of a checkpoint that keeps rates and rank 0's states of callbacks.
    Collective. Raises GMetaError: a callback set other rates on another rank."""
    rates = run.optimizer.full_rates
    everyone = broadcast_value(gather_values(rates, ranks), ranks) or []
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise GMetaError(
                f"a callback set the rates {other} on rank {rank} and {everyone[0]} on rank 0: the "
                "ranks would train different layers. Set them by what all ranks know alike, as a "
                "reading"
            )
    return {CALLBACKS_FILE: json.dumps({"rates": rates, "states": states})}


def read_callbacks(checkpoint: Path, run: Run) -> dict[str, Any]:
    """Return the states of callbacks that a checkpoint keeps, and set its rates. Raises
    GMetaError: its file is damaged."""
    path = checkpoint / CALLBACKS_FILE
    if not path.exists():  # the run had no callbacks then
        return {}
    try:
        kept = read_json(path)
        run.set_rates(**kept["rates"])
        return dict(kept["states"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GMetaError(
            f"{path} is damaged ({error!r:.200}). Restore it, or resume from another checkpoint"
        ) from error
