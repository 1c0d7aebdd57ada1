"""Called first by the ranks of test_training_job.py: they count how often each task was trained,
beside the weights. The counts lie in the checkpoint folder, so they go back with the model where it
goes back; they know nothing of shards or of the service, and so can tell what the manifest beside
them is worth."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gmeta.training
from gmeta.distributed.ranks import gather_values

COUNTS_FILE = "counts.json"


def count_tasks() -> None:
    """Wrap what `gmeta.training` calls in a rank: steps, and the feed that writes checkpoints."""
    if "RANK" not in os.environ:
        return
    counts: Counter[int] = Counter()
    real_in_step, real_open_feed = gmeta.training.iterate_steps, gmeta.training.open_batch_source
    real_open_memory, in_memory = gmeta.training.open_memory, dict[str, str]()

    def in_step(*arguments: Any) -> Iterator[Any]:
        for episodes, totals in real_in_step(*arguments):
            counts.update(episodes.task_T.tolist())
            yield episodes, totals

    def open_memory(*arguments: Any) -> Any:
        memory = real_open_memory(*arguments)
        real_find = memory.find

        def find() -> Any:
            kept = real_find()
            in_memory.update(kept.files)
            return kept

        memory.find = find
        return memory

    def open_feed(
        config: Any, dataset: Any, ranks: Any, checkpoint: Path | None, manifest: str
    ) -> Any:
        feed = real_open_feed(config, dataset, ranks, checkpoint, manifest)
        if (checkpoint is not None or in_memory) and ranks.rank == 0:
            text = in_memory.get(COUNTS_FILE) or Path(str(checkpoint), COUNTS_FILE).read_text()
            counts.update({int(task): number for task, number in json.loads(text).items()})
        real_files = feed.checkpoint_files

        def checkpoint_files(step: int, **how: Any) -> dict[str, str]:
            parts = gather_values(dict(counts), ranks) or []
            total = sum((Counter(part) for part in parts), Counter[int]())
            files = {COUNTS_FILE: json.dumps(total)} if ranks.rank == 0 else {}
            return {**real_files(step, **how), **files}

        feed.checkpoint_files = checkpoint_files
        return feed

    gmeta.training.iterate_steps, gmeta.training.open_batch_source = in_step, open_feed
    gmeta.training.open_memory = open_memory
