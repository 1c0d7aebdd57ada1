"""The labels that predictions are scored by.

Shape suffixes: N rows, L labels"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class ScoredLabel(NamedTuple):
    """A label that predictions are scored by: one of the dataset's, or one given another, such as
    `buy|click`, a conversion rate over the rows that were clicked."""

    name: str  # "" where a dataset's one label has none
    is_judged: bool
    at: int  # its place among the dataset's labels
    among: int = -1  # that of the label which must be 1; -1: all rows count

    @property
    def suffix(self) -> str:
        """Return the suffix of its columns of predictions."""
        return "" if self.is_judged else f":{self.name}"

    def label_N(self, label: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return this label of rows whose labels are [N] or [N, L]; NaN where it is unknown."""
        # With no rows, -1 would stand for any number of labels.
        label_NL = label if label.ndim > 1 else label[:, None]
        own_N: npt.NDArray[Any] = label_NL[:, self.at]
        if self.among < 0:
            return own_N
        conditional_N: npt.NDArray[Any] = np.where(label_NL[:, self.among] == 1, own_N, np.nan)
        return conditional_N

    def prediction_N(self, prediction_NL: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the prediction of this label, from those of all labels; NaN for 0 / 0."""
        own_N: npt.NDArray[Any] = prediction_NL[:, self.at]
        if self.among < 0:
            return own_N
        # Of one label given another: the probability of both divided by the other's.
        with np.errstate(divide="ignore", invalid="ignore"):
            own_N = own_N / prediction_NL[:, self.among]
        # Rounded quotients of equal numbers may lie above 1.
        own_N[own_N > 1] = 1
        return own_N


# Of a dataset whose label every row has.
ONE_LABEL = ScoredLabel("", True, 0)
