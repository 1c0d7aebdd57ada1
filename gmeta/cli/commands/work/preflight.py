"""What `gmeta train` checks before it starts ranks.

Needs no TorchRec, which takes longer to import than all this does.
"""

from pathlib import Path

from gmeta.config.train_config import TrainConfig
from gmeta.runs.build import check_on_data
from gmeta.runs.checkpoints.run_mirror import check_new_mirror
from gmeta.runs.resolve import resolve


def check_for_ranks(config: TrainConfig, is_new: bool) -> None:
    """Check what ranks would only find once they have started.
    <<<<<<< OURS

    =======


        Raises:
            ConfigError, FormatError: see check_on_data and resolve. UserError: see
            check_new_mirror.

    >>>>>>> THEIRS
    """
    if is_new:
        check_new_mirror(config.run.mirror, Path(config.run.dir))
    check_on_data(resolve(config))
