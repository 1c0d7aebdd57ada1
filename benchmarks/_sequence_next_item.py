"""Next item on leave-one-out logs, as a user runs it: prepare, train, evaluate, by the example's
config; beside it the most popular items."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from _common import REPOSITORY

from gmeta.config.train_config import load_config
from gmeta.data.event_layout import EventColumns
from gmeta.data.item_catalogue import ItemCatalogue
from gmeta.data.item_counts import log_shares
from gmeta.evaluation.item_vectors import ItemVectors
from metaio.format.dataset import open_dataset
from metaio.read.compose import compose

EXAMPLE = REPOSITORY / "examples" / "next-item.toml"
# Chosen on validation; those of Beauty are the example's. Of a thousand users a step of 128 tasks
# is a ninth.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "beauty": (),
    "lastfm": ("data.tasks_per_step=32", "outer.warmup_steps=50", "run.epochs=60"),
}


def run_gmeta(*arguments: str) -> None:
    """Run a command of gmeta, which must end well."""
    subprocess.run([sys.executable, "-m", "gmeta", *arguments], check=True, capture_output=True)


def rank_by_popularity(data: Path) -> tuple[float, float]:
    """HR@10 and nDCG@10 on the test split of the most popular items that a user has not had."""
    dataset, model = open_dataset(str(data)), load_config(EXAMPLE).model
    columns = EventColumns.of(dataset.features, model)
    catalogue = ItemCatalogue.of(dataset, columns)
    share_A = log_shares(dataset, "train", columns.target[0])[catalogue.ids_AM[:, 0]]
    items = ItemVectors(catalogue, torch.from_numpy(share_A).unsqueeze(1))
    places = []
    for index in range(dataset.split("test").num_blocks):
        block = dataset.read_block("test", index)
        batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
        last = batch.row_offsets_T1[1:] - 1  # the one query row of a task
        own = batch.unique_ids_U[batch.positions_NF[last, columns.target[0]].long()].numpy()
        known = batch.unique_ids_U[batch.event_positions[:, 0].long()].numpy()
        user = torch.ones(len(own), 1)
        places.append(items.rank_N2(user, own, (known, batch.events_before_N[last].numpy())))
    rank = np.concatenate(places).astype(np.float64) @ [1.0, 0.5]  # ties share their ranks
    return float((rank < 10).mean()), float(np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean())


def measure_next_item(folder: Path, seeds: int) -> dict[str, float]:
    """Means over the seeds of HR@10 and nDCG@10 of each log in a folder, and their spread."""
    figures: dict[str, float] = {}
    for log, overrides in OVERRIDES.items():
        with tempfile.TemporaryDirectory() as name:
            data, found = Path(name, "data"), []
            paths = [str(folder / f"{log}.txt"), str(folder / f"{log}_attributes.json")]
            run_gmeta("prepare", "--recipe", "next-item", *paths, str(data))
            popular = rank_by_popularity(data)
            figures[f"{log}_popular_hr10"], figures[f"{log}_popular_ndcg10"] = popular
            for seed in range(seeds):
                run = Path(name, f"run-{seed}")
                own = (f"data.path={data}", f"run.dir={run}", f"run.seed={seed}", *overrides)
                run_gmeta("train", str(EXAMPLE), *own)
                run_gmeta("evaluate", str(run))
                report = json.loads((run / "evaluation" / "evaluation.json").read_text())
                metrics = report["groups"][0]["results"][1]["metrics"]
                found.append([metrics[metric]["value"] for metric in ("hr@10", "ndcg@10")])
                print(f"{log}, seed {seed}: HR@10 {found[-1][0]:.4f}, nDCG@10 {found[-1][1]:.4f}")
            for metric, values in zip(("hr10", "ndcg10"), zip(*found, strict=True), strict=True):
                figures[f"{log}_{metric}"] = statistics.mean(values)
                figures[f"{log}_{metric}_spread"] = max(values) - min(values)
    return figures
