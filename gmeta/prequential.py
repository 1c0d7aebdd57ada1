"""Prequential scores: what a model predicts of an increment before it is trained on it.

The support rows of a returning task are older than the increment's window and its query rows are
in it, so the scores are those of a true forecast (Dawid 1984: "predict, then learn").
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gmeta.checkpoints.lineage import Lineage
from gmeta.feeds.increment import data_of
from gmeta.predictions import Scored
from gmeta.runs.folder import PREQUENTIAL_FILE, write_json
from gmeta.validation import score_split


def forecast(scored: Scored, lineage: Lineage) -> list[str]:
    """Score every split of the increment that is trained next, the last of `lineage`, keep the
    scores in the run folder (prequential.json) and return a line on each. Collective.
    """
    config, dataset = scored.config, scored.dataset
    # No split was trained on: each is read as it is stored. Which one is validated on stays, as the
    # keys of early stopping, whose metric is among the scores, ask for one.
    data = replace(data_of(config.data, dataset), valid_split=config.data.valid_split)
    scored = replace(scored, config=replace(config, data=data))
    splits = [name for name, split in dataset.splits.items() if split.num_episodes]
    found = {name: score_split(scored, name) for name in splits}
    if scored.ranks.rank != 0:
        return []
    kept: dict[str, Any] = {
        "increment": lineage[-1].increment,
        "fingerprint": lineage[-1].fingerprint,
        "trained_on": [one.increment for one in lineage[:-1]],
        "splits": {
            name: {"num_tasks": one.num_tasks, "scores": one.scores} for name, one in found.items()
        },
    }
    write_json(Path(config.run.dir) / PREQUENTIAL_FILE, kept)
    return [
        line
        for name, one in found.items()
        for line in (f"before training, {name}: {_told(one.scores)}", *one.told)
    ]


def _told(scores: dict[str, float | None]) -> str:
    return ", ".join(
        f"{name} {'undefined' if value is None else f'{value:.4f}'}"
        for name, value in scores.items()
    )
