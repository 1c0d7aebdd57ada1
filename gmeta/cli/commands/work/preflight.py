"""The checks of `gmeta train` before it starts ranks."""

# No import of TorchRec here: it takes longer than all of these checks.
from pathlib import Path

from gmeta.config.train_config import TrainConfig
from gmeta.runs.build import check_on_data
from gmeta.runs.checkpoints.run_mirror import check_new_mirror
from gmeta.runs.resolve import resolve


def check_for_ranks(config: TrainConfig, is_new: bool) -> None:
    """Raise GMetaError for what ranks would only find once they have started."""
    if is_new:
        check_new_mirror(config.run.mirror, Path(config.run.dir))
    check_on_data(resolve(config))
