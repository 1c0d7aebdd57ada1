"""How a run adapts, in place of what its config says: as an evaluation chose on validation splits
for one of its checkpoints, in adapting.json of its folder. Exports of that checkpoint adapt so."""

import math
from dataclasses import replace
from typing import Any

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import GMetaError
from gmeta.platform.files.checked_json import read_json
from gmeta.runs.run_folder import RunFolder, write_json

CHOSEN_ADAPTATION_FILE = "adapting.json"


def write_chosen_adaptation(
    folder: RunFolder, step: int, rate: float, steps: int, **provenance: Any
) -> None:
    """Keep the rate and steps that were chosen for a run's checkpoint; `told` says how."""
    chosen = {"step": step, "inner_lr": rate, "inner_steps": steps, **provenance}
    write_json(folder.root / CHOSEN_ADAPTATION_FILE, chosen)


def read_chosen_adaptation(
    folder: RunFolder, run_algorithm: AlgorithmConfig, step: int
) -> AlgorithmConfig | None:
    """Return `own`, the algorithm of the run's config, with what was chosen for the checkpoint of
    this step; None where nothing was chosen."""
    path = folder.root / CHOSEN_ADAPTATION_FILE
    if not path.exists():
        return None
    try:
        saved = read_json(path)
        if saved["step"] != step:
            return None
        rate, steps = float(saved["inner_lr"]), saved["inner_steps"]
        if not (math.isfinite(rate) and rate > 0 and type(steps) is int and steps > 0):
            raise ValueError("it holds no rate and steps above 0")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GMetaError(
            f"{path} is damaged: {error}. Evaluate the run again, or remove the file: the run then "
            "adapts as its config says"
        ) from error
    return replace(run_algorithm, inner_lr=rate, inner_steps=steps)
