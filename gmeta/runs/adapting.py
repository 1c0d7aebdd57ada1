"""How a run adapts, in place of what its config says: as an evaluation chose on validation splits
for one of its checkpoints, in adapting.json of its folder. Exports of that checkpoint adapt so.
"""

import math
from dataclasses import replace
from typing import Any

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.errors import GMetaError
from gmeta.files.checked_json import read_json
from gmeta.runs.folder import RunFolder, write_json

ADAPTING_FILE = "adapting.json"


def write_adapting(folder: RunFolder, step: int, rate: float, steps: int, **told: Any) -> None:
    """Keep the rate and steps that were chosen for a run's checkpoint; `told` says how."""
    chosen = {"step": step, "inner_lr": rate, "inner_steps": steps, **told}
    write_json(folder.root / ADAPTING_FILE, chosen)


def read_adapting(folder: RunFolder, own: AlgorithmConfig, step: int) -> AlgorithmConfig | None:
    """Return `own`, the algorithm of the run's config, with what was chosen for the checkpoint of
    this step; None where nothing was chosen."""
    path = folder.root / ADAPTING_FILE
    if not path.exists():
        return None
    try:
        kept = read_json(path)
        if kept["step"] != step:
            return None
        rate, steps = float(kept["inner_lr"]), kept["inner_steps"]
        if not (math.isfinite(rate) and rate > 0 and type(steps) is int and steps > 0):
            raise ValueError("it holds no rate and steps above 0")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GMetaError(
            f"{path} is damaged: {error}. Evaluate the run again, or remove the file: the run then "
            "adapts as its config says"
        ) from error
    return replace(own, inner_lr=rate, inner_steps=steps)
