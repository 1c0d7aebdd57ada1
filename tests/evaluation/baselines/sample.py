"""Small training rows, as arrays and as a plain list of what each row holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmeta.config.losses import Loss
from gmeta.evaluation.baselines.block_rows import unpack_block
from gmeta.evaluation.baselines.episode_rows import EpisodeRows
from metaio import Provenance, write_dataset
from metaio.format.block import Rows, build_block
from metaio.format.features import Features, FeatureSpec, TableSpec

FEATURES = Features(
    tables=(TableSpec("item", 20), TableSpec("maker", 6), TableSpec("tag", 9)),
    single=(FeatureSpec("maker", "maker"), FeatureSpec("item", "item")),
    multi=(FeatureSpec("tags", "tag"),),
    dense=("price",),
)
MAKER, ITEM, TAGS = range(3)


def raw_rows(num_tasks: int, loss: Loss, seed: int = 0, first_task: int = 100) -> Rows:
    """Tasks of 3 to 9 rows with tastes of their own; items differ, and have a maker and tags."""
    rng = np.random.default_rng(seed)
    lengths_T = rng.integers(3, 10, num_tasks)
    support_T = rng.integers(0, lengths_T - 1)
    taste_N = np.repeat(rng.normal(0, 1, num_tasks), lengths_T)
    item_N = rng.integers(1, 20, taste_N.size)
    level_I = np.random.default_rng(9).normal(0, 1, 20)
    label_N = 3.0 + taste_N + level_I[item_N] + rng.normal(0, 0.5, taste_N.size)
    if loss == "bce":
        label_N = (label_N > 3).astype(np.float64)
    lengths_N1 = (item_N % 3).astype(np.int32)[:, None]  # some items have no tag
    tags = [(7 * int(item) + place) % 9 for item in item_N for place in range(int(item) % 3)]
    return Rows(
        task_T=np.arange(num_tasks) + first_task, row_lengths_T=lengths_T,
        support_lengths_T=support_T, label_N=label_N.astype(np.float32),
        dense_NK=rng.random((taste_N.size, 1)).astype(np.float32),
        ids_NF=np.stack([item_N % 6, item_N], axis=1), multi_ids_V=np.array(tags, np.int64),
        multi_lengths_NM=lengths_N1,
    )  # fmt: skip


def episode_rows(num_tasks: int, loss: Loss, seed: int = 0, first_task: int = 100) -> EpisodeRows:
    """The same rows as a stored block gives them."""
    return unpack_block(build_block(FEATURES, raw_rows(num_tasks, loss, seed, first_task)))


def write_data(path: Path, loss: Loss, poisoned: bool = False) -> Path:
    """A dataset with splits train, valid and cold; poisoned: all query labels of `cold` differ."""
    with write_dataset(str(path), FEATURES, Provenance("user", "label")) as writer:
        writer.split("train").write(raw_rows(60, loss))
        writer.split("valid").write(raw_rows(30, loss, 1, 1000))
        cold = raw_rows(30, loss, 2, 2000)
        if poisoned:
            cold = _with_other_query_labels(cold)
        writer.split("cold").write(cold)
    return path


def _with_other_query_labels(rows: Rows) -> Rows:
    within = np.concatenate([np.arange(length) for length in rows.row_lengths_T])
    is_query = within >= np.repeat(rows.support_lengths_T, rows.row_lengths_T)
    rows.label_N[is_query] = 1.0 - rows.label_N[is_query]
    return rows


@dataclass(frozen=True)
class PlainRow:
    """One row as a person would write it down."""

    episode: int
    task: int
    is_support: bool
    label: float
    ids: tuple[tuple[int, ...], ...]  # of maker, item and tags


def plain(rows: EpisodeRows) -> list[PlainRow]:
    """The rows one by one."""
    found = []
    for n, episode in enumerate(rows.episode_N.tolist()):
        tags = rows.multi[0].ids_V[rows.multi[0].offsets_N1[n] : rows.multi[0].offsets_N1[n + 1]]
        found.append(
            PlainRow(
                episode, int(rows.task_T[episode]), bool(rows.is_support_N[n]),
                float(rows.label_N[n]),
                (*((int(one),) for one in rows.ids_NF[n]), tuple(tags.tolist())),
            )
        )  # fmt: skip
    return found


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")
