"""The [model] section of a training config."""

from dataclasses import dataclass
from typing import Any, Literal

from gmeta_keys import key

Pooling = Literal["mean", "sum"]


def resolve_pooling(model: object) -> Pooling:
    """Return how a model pools lists: the mean where its `pooling` is no name, as a layer's."""
    return "sum" if getattr(model, "pooling", None) == "sum" else "mean"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, what all models share, and the options of one alone."""

    name: str = key(
        "dlrm",
        "dlrm, melu, cbml, din, deepfm, dcnv2, dot, mmoe or ple; or one of your own "
        "(docs/extending.md)",
    )
    # fbgemm's kernels read a row four values at a time.
    embedding_dim: int = key(
        16, "width of every embedding table; a multiple of 4", min=4, multiple=4
    )
    hidden: tuple[int, ...] = key((256, 128), "widths of the hidden layers", min=1)
    output_bias: float = key(
        0.0, "added to the last layer's initial bias: the mean label, or its logit"
    )
    linear_start: bool = key(
        False,
        "melu, din: a fresh model starts as the linear (bce: logistic) regression of the "
        "label on all dense inputs",
    )
    pooling: Pooling = key("mean", "how the ids of a multi-id feature become one vector")
    width: Literal["equal", "auto"] = key(
        "equal",
        "width of the tables: embedding_dim for all, or by their rows, at most that: 6 "
        "rows^0.25 (auto)",
    )
    widths: tuple[str, ...] = key(
        (), 'exceptions: the widths of single tables, multiples of 4, e.g. ["city=4"]'
    )
    dropout: float = key(
        0.0,
        "share of the units behind each hidden layer that a training step leaves out",
        min=0.0,
        max=0.9,
    )
    admission: tuple[int, ...] = key(
        (0, 0),
        "after how many steps that ask for a row it has an embedding of its own, where rare rows "
        "of a table share one; after how many without, not any more; 0: never "
        "(docs/scaling.md)",
        min=0,
    )
    without: tuple[str, ...] = key(
        (),
        'tables whose ids the model does not see, e.g. ["item"]; statistics of items stay inputs, '
        "and an encoder of events reads them",
    )
    options: dict[str, Any] = key(dict, "keys of one model alone, as [model.options]")
    events: Literal["none", "sasrec", "hstu", "sim", "din"] = key(
        "none",
        "encoder of the dataset's events, whose vector stands beside the dense columns; none: "
        "events are not read",
    )
    event_options: dict[str, Any] = key(
        dict, "keys of one encoder of events alone, as [model.event_options]"
    )


@dataclass(frozen=True)
class SparseColumn:
    """A column of ids and the table that they index."""

    name: str
    table: str


@dataclass(frozen=True)
class InputSizes:
    """The numbers of a dataset's columns: F single-id, M multi-id, K dense; and of outputs."""

    # Names of sparse columns are for models that treat one of them in a special way.
    num_single: int
    num_multi: int
    num_dense: int
    single: tuple[SparseColumn, ...] = ()
    multi: tuple[SparseColumn, ...] = ()
    outputs: int = 1

    def side_by_side(self, embedding_dim: int) -> int:
        """Return the width of a row whose features and dense columns stand side by side."""
        return (self.num_single + self.num_multi) * embedding_dim + self.num_dense
