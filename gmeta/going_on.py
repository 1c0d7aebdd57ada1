"""Whether a run can go on from a checkpoint with the config and the data that it is given now."""

from pathlib import Path

from gmeta.checkpoint_files import read_progress
from gmeta.config import TrainConfig
from gmeta.errors import UserError
from gmeta.run_folder import CONFIG_FILE, RunFolder
from metaio import Dataset

# What decides which episodes a static step of an epoch holds. The service keeps its own account.
ORDER_KEYS = (
    "data.train_split",
    "data.tasks_per_step",
    "data.shuffle",
    "data.lanes",
    "data.window_blocks",
    "data.blocks_per_step",
    "data.drop_last",
    "run.seed",
)


def check_goes_on(
    folder: RunFolder, checkpoint: Path, config: TrainConfig, dataset: Dataset
) -> None:
    """Refuse what would train some episodes twice and others never, or on ids that mean something
    else. A run folder that does not say what it was trained with is taken at its word.

    Raises:
        UserError: the order of a half-done epoch was changed.
        GMetaError: the dataset is another.
    """
    if folder.trained_on():
        folder.check_dataset(dataset.url, dataset.fingerprint)
    in_epoch = read_progress(checkpoint).epoch_step
    if config.data.source != "static" or not in_epoch or not (folder.root / CONFIG_FILE).exists():
        return
    before, now = folder.read_config().to_json(), config.to_json()
    for name in ORDER_KEYS:
        section, key = name.split(".")
        if before[section][key] != now[section][key]:
            raise UserError(
                f"{name} = {now[section][key]!r}, but run {folder.root} stands {in_epoch} steps "
                f"into an epoch that began with {before[section][key]!r}: the rest of it would "
                "train some episodes twice and others never. Set it as it was until the epoch is "
                "over, or choose another run.dir"
            )
