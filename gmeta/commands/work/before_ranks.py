"""What `gmeta train` checks before it starts ranks.

Needs no TorchRec, which takes longer to import than all this does.
"""

from pathlib import Path

from gmeta.build import check_on_data
from gmeta.checkpoints.mirror import check_new_mirror
from gmeta.config import TrainConfig
from gmeta.resolve import resolve


def check_for_ranks(config: TrainConfig, is_new: bool) -> None:
    """Check what ranks would only find once they have started.

    Raises:
        ConfigError, FormatError: see check_on_data and resolve. UserError: see check_new_mirror.
    """
    if is_new:
        check_new_mirror(config.run.mirror, Path(config.run.dir))
    check_on_data(resolve(config))
