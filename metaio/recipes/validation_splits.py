"""The splits of --validation: `fit` and `valid-...` are carved out of `train`, which stays."""

from metaio.format.dataset import Dataset


def find_overlapping_splits(split: str, dataset: Dataset) -> set[str]:
    """Return the splits that hold rows of this one, itself included."""
    parts = {one for one in dataset.splits if one == "fit" or one.startswith("valid-")}
    if not {"train", "fit"} <= dataset.splits.keys() or split not in parts | {"train"}:
        return {split}
    return parts | {"train"} if split == "train" else {split, "train"}
