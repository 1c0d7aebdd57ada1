"""What `gmeta train` checks before it starts ranks.

Needs no TorchRec, which takes longer to import than all this does.
"""

from pathlib import Path

from gmeta.build import check_on_data
from gmeta.checkpoints.mirror import check_new_mirror
from gmeta.checkpoints.settled import settled
from gmeta.config import TrainConfig


def check_for_ranks(config: TrainConfig, is_new: bool) -> None:
    """Check what ranks would only find once they have started."""
    if is_new:
        check_new_mirror(config.run.mirror, Path(config.run.dir))
    check_on_data(settled(config))
