"""What a run begins with: its own checkpoint, another run's, weights of another, or nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.distributed.optim.optimizers import OuterOptimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.runs.checkpoints.continuation import extend_lineage, find_continued_checkpoint
from gmeta.runs.checkpoints.growth import load_into_grown_tables
from gmeta.runs.checkpoints.joined_inputs import JoinedInputs, find_joined_inputs
from gmeta.runs.checkpoints.lineage import Lineage, count_earlier_steps, read_lineage
from gmeta.runs.checkpoints.loader import PARTS_OF_ALGORITHMS, load_checkpoint
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.checkpoints.resume import check_resumable, find_start_checkpoint
from gmeta.runs.run_folder import RunFolder, parse_checkpoint_step
from gmeta.runs.run_progress import RunProgress
from metaio.format.dataset import Dataset
from metaio.ragged import Int64
from metaio.stream.chain import find_earlier_increment, read_reset_rows


@dataclass(frozen=True)
class Beginning:
    """The checkpoint, if any, that a run begins with, how, and the lineage, the run included."""

    how: Literal["fresh", "resumed", "weights", "continued"]
    checkpoint: Path | None
    lineage: Lineage
    reset_rows: dict[str, Int64]
    joined: JoinedInputs | None = None  # inputs of the increment that the checkpoint does not know

    @property
    def resumed_from(self) -> Path | None:
        """Return the run's own checkpoint that it goes on from, if any."""
        return self.checkpoint if self.how == "resumed" else None

    @property
    def messages(self) -> list[str]:
        """Return the lines on it for the screen."""
        if self.how == "weights":
            return [f"begins with the weights of {self.checkpoint}"]
        if self.how == "resumed":
            return [f"goes on from {self.checkpoint}"]
        if self.how == "continued":
            num_reset = sum(rows.size for rows in self.reset_rows.values())
            reset = f"; {num_reset:,} reused rows begin anew" if num_reset else ""
            before, own = (one.increment for one in self.lineage[-2:])
            numbers = ", ".join(map(str, range(before + 1, own)))
            skipped = f", without increment {numbers}" if numbers else ""
            joined = ""
            if self.joined is not None:
                joined = f"; {', '.join(self.joined.names)} joined, at weight 0"
            return [f"goes on from {self.checkpoint}{skipped}{reset}{joined}"]
        return []

    def load(
        self,
        outer: OuterConfig,
        sharded: DistributedLearner,
        optimizer: OuterOptimizer,
        ranks: Ranks,
    ) -> RunProgress:
        """Fill a fresh model and its optimizer; return the run's progress. Raises on every rank
        alike GMetaError: the checkpoint is damaged; UserError: it is of another model."""
        # Adam's bias correction goes on with the steps of the runs before.
        optimizer.steps_before = count_earlier_steps(self.lineage)
        if self.checkpoint is None:
            return RunProgress()
        if self.how == "resumed":
            # Before the first step optimizers have no state.
            kept = optimizer if parse_checkpoint_step(self.checkpoint) else None
            return load_checkpoint(self.checkpoint, sharded, kept, ranks)
        if self.how == "weights":
            load_checkpoint(self.checkpoint, sharded, None, ranks, PARTS_OF_ALGORITHMS)
        else:
            rows, joined = self.reset_rows, self.joined
            load_into_grown_tables(self.checkpoint, sharded, optimizer, ranks, outer, rows, joined)
        return RunProgress()


def beginning_of(
    folder: RunFolder, newest: Path | None, config: TrainConfig, dataset: Dataset
) -> Beginning:
    """Return the beginning of the run in `folder`, whose newest checkpoint is `newest`. Raises
    UserError or GMetaError: config or dataset do not fit it."""
    if newest is not None:
        check_resumable(folder, newest, config, dataset)
        return Beginning("resumed", newest, read_lineage(read_about(newest)), {})
    if start := find_start_checkpoint(config.run, dataset):
        # The same data, so its increment is the last of theirs; the optimizers begin anew.
        seen = tuple(replace(one, steps=0) for one in read_lineage(read_about(start)))
        return Beginning("weights", start, seen or extend_lineage((), dataset), {})
    checkpoint, before, skipped = find_continued_checkpoint(config, dataset)
    lineage = extend_lineage(before, dataset)
    if checkpoint is None:
        return Beginning("fresh", None, lineage, {})
    resets = _reset_since([*skipped, dataset])
    last = find_earlier_increment(dataset, 1 + len(skipped))
    joined = None if last is None else find_joined_inputs(last, dataset, config.model)
    return Beginning("continued", checkpoint, lineage, resets, joined)


def _reset_since(datasets: Sequence[Dataset]) -> dict[str, Int64]:
    # Also rows reused in an increment that is skipped mean another value since the checkpoint.
    found: dict[str, Int64] = {}
    for dataset in datasets:
        for table, rows in read_reset_rows(dataset).items():
            found[table] = np.union1d(found.get(table, rows), rows)
    return found
