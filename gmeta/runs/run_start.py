"""Makes the folder of a run that begins, or describes one anew that goes on."""

from typing import Any

from gmeta.config.train_config import TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.runs.build import find_all_plugins
from gmeta.runs.environment import describe_environment
from gmeta.runs.run_folder import create_run_folder, truncate_metrics, write_json
from gmeta.runs.run_progress import RunProgress


def begin_run(
    config: TrainConfig, ranks: Ranks, fingerprint: str, plan: dict[str, Any], at: RunProgress
) -> None:
    """Write what a run that stands `at` some progress is, and on what it runs. Rank 0 alone calls
    it."""
    plugins = find_all_plugins(config)
    folder = create_run_folder(config, describe_environment(ranks.world_size, fingerprint, plugins))
    write_json(folder.plan, plan)
    # Steps beyond the checkpoint are taken, and logged, again.
    truncate_metrics(folder, at.step)
