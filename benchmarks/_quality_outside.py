"""An outside yardstick for benchmarks/quality.py: a script of anybody's, run on the same episodes,
whose printed rows become one more column.

It is called as `python SCRIPT SPEC.json`. SPEC names a CSV with a row a line, `file`, and its
columns: `split`, `task`, `item`, `cats` (of the item), `ucats` (of the task), `ctx` (of the row),
`dense`, `y`; beside these the CSV has `is_query`, 0 or 1, and `pos`, a row's place in its task. The
rest of SPEC: `kind` ("r" rating, "c" click), `tests` (splits), `K` (draws of support and query a
training task), `hide` (share of the items that are new in a draw), `thr` (a good rating),
`by_time` (support is the past), `query_rows`. It prints rows such as

    NAME OF A MODEL   SPLIT   MAE 0.7512 AUC 0.7034

and chooses on the split `valid`. Of several models each metric is taken from the best there."""

import csv
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.config.train_config import load_config
from metaio import open_dataset
from metaio.format.block import Block
from metaio.format.dataset import Dataset
from metaio.ragged import find_firsts, owners, places

Values = dict[tuple[str, str], float]  # by split and metric
_ROW = re.compile(r"^(?P<model>.+?)\s+(?P<split>\S+)\s+(?P<metrics>([A-Za-z]+ -?[\d.]+\s*)+)$")
DRAWS, HIDDEN = 4, 0.1


def measure_outside(script: Path, place: Path, config: Path, splits: tuple[str, ...]) -> Values:
    """What the script reaches on the episodes of `place`/data, kept while both stay as they are.

    Raises:
        RuntimeError: it failed; the last line that it printed."""
    dataset, folder = open_dataset(str(place / "data")), place / "outside"
    folder.mkdir(exist_ok=True)
    stamp = hashlib.sha256((script.read_text() + dataset.fingerprint).encode()).hexdigest()
    printed = folder / f"{stamp[:16]}.txt"
    if not printed.exists():
        spec = write_episodes(dataset, folder, config, splits)
        ran = subprocess.run(
            [sys.executable, str(script), str(spec)], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise RuntimeError((ran.stderr.strip().splitlines() or ["nothing was printed"])[-1])
        printed.write_text(ran.stdout)
    return read_rows(printed.read_text(), splits)


def read_rows(text: str, splits: tuple[str, ...]) -> Values:
    """The value of each metric in each split, of the model that is best by it on `valid`."""
    values: dict[str, dict[tuple[str, str], float]] = {}
    for row in filter(None, map(_ROW.match, text.splitlines())):
        words = row["metrics"].lower().split()
        for metric, value in zip(words[::2], words[1::2], strict=True):
            values.setdefault(metric, {})[row["model"].strip(), row["split"]] = float(value)
    found = {}
    for metric, by_model in values.items():
        sign = -1.0 if metric in ("mae", "rmse", "logloss") else 1.0
        on_valid = {model: sign * v for (model, split), v in by_model.items() if split == "valid"}
        best = max(on_valid, key=lambda model: on_valid[model], default="")
        found |= {(s, metric): by_model[best, s] for s in splits if (best, s) in by_model}
    return found


def write_episodes(dataset: Dataset, folder: Path, config: Path, splits: tuple[str, ...]) -> Path:
    """Write the CSV of a prepared dataset's episodes and the SPEC of it; return the SPEC's path."""
    features, file = dataset.features, folder / "episodes.csv"
    ids = [feature.name for feature in features.single]
    names = ["split", "task", "is_query", "pos", "y", *ids, *features.dense]
    varying: set[str] = set()  # inside some task
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(names)
        for split in ("train", "valid", *splits):
            for block in range(dataset.splits[split].num_blocks):
                stored = dataset.read_block(split, block)
                ids_NF = stored.unique_ids_U[stored.positions_NF]
                first_NF = ids_NF[np.repeat(stored.row_offsets_T1[:-1], _rows_T(stored))]
                differs_F = (ids_NF != first_NF).any(axis=0)
                varying |= {name for name, one in zip(ids, differs_F, strict=True) if one}
                writer.writerows(_rows(split, block, stored, ids_NF))
    recipe: Mapping[str, Any] = dataset.manifest.recipe.get("schema", {})
    rule = recipe.get("item") or recipe.get("negatives") or {}
    item = rule.get("column") or rule.get("item") or ids[0]
    of_item = [name for name in rule.get("columns") or () if name in ids]
    others = [name for name in ids if name not in (item, *of_item)]
    settings = load_config(config, [f"data.path={dataset.url}"])
    spec = {
        "name": folder.parent.name, "file": str(file), "split": "split", "task": "task",
        "item": item, "cats": of_item, "ucats": [name for name in others if name not in varying],
        "ctx": [name for name in others if name in varying], "dense": list(features.dense),
        "y": "y", "kind": "c" if settings.outer.loss == "bce" else "r", "tests": list(splits),
        "K": DRAWS, "hide": HIDDEN, "thr": settings.evaluation.positive_rating or 4.0,
        "by_time": dataset.manifest.support_is_past,
        "query_rows": recipe.get("episodes", {}).get("query_rows"),
    }  # fmt: skip
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def _rows_T(block: Block) -> Any:
    return np.diff(block.row_offsets_T1)


def _rows(split: str, number: int, block: Block, ids_NF: Any) -> Iterator[list[Any]]:
    # An episode is a task here: of a long task there are several, and each has its own support.
    task_N, place_N = owners(_rows_T(block)), places(_rows_T(block))
    is_query_N = ~find_firsts(_rows_T(block), block.support_lengths_T)
    for at, (task, place, is_query) in enumerate(zip(task_N, place_N, is_query_N, strict=True)):
        name = f"{split}-{number}-{task}"
        values = [*ids_NF[at], *block.dense_NK[at]]
        yield [split, name, int(is_query), place, block.label_N[at], *values]
