"""What predictions are called, in files and in answers alike: a name for each label.

Shape suffixes: N rows, L labels"""

from typing import NamedTuple, TypeVar

from gmeta.serving.exported_folder import ExportedConfig

PREDICTION = "prediction"
BEFORE = "prediction_before"  # without adaptation

# A tensor or an array, [N] or [N, L].
Values = TypeVar("Values")


class Output(NamedTuple):
    """One column of predictions, such as `prediction_buy`; `kind` is PREDICTION or BEFORE."""

    name: str
    kind: str
    label: str  # "" where the model's one label has no name
    loss: str
    label_index: int | None  # its place among the labels; None where predictions are [N]

    def values_N(self, predictions: Values) -> Values:
        """Return this output's values among the predictions of all labels."""
        if self.label_index is None:
            return predictions
        return predictions[:, self.label_index]  # type: ignore[index, no-any-return]


def list_outputs(config: ExportedConfig) -> tuple[Output, ...]:
    """Return the outputs of a model: first those after adaptation, in the order of its labels."""
    labels = config.features.labels or ("",)
    several = len(labels) > 1
    return tuple(
        # A single label adds nothing to the name, whether it has one or not.
        Output(f"{of}_{label}" if several else of, of, label, loss, at if several else None)
        for of in (PREDICTION, BEFORE)
        for at, (label, loss) in enumerate(zip(labels, config.losses, strict=True))
    )
