"""What can be chosen about a model; the [model] section of a training config."""

from dataclasses import dataclass, field
from typing import Literal

Pooling = Literal["mean", "sum"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants; a model ignores what it has no use for."""

    name: str = field(default="dlrm", metadata={"help": "dlrm, melu, cbml or din"})
    embedding_dim: int = field(
        default=16,
        # fbgemm's kernels read a row four values at a time.
        metadata={
            "help": "width of every embedding table; a multiple of 4",
            "min": 4,
            "multiple": 4,
        },
    )
    hidden: tuple[int, ...] = field(
        default=(256, 128),
        metadata={"help": "widths of the layers between the interaction and the output", "min": 1},
    )
    bottom: tuple[int, ...] = field(
        default=(64,),
        metadata={"help": "dlrm: hidden widths of the MLP over the dense columns", "min": 1},
    )
    interaction: Literal["dot", "cat"] = field(
        default="dot", metadata={"help": "dlrm: pairwise dot products, or plain concatenation"}
    )
    output_bias: float = field(
        default=0.0,
        metadata={"help": "added to the last layer's initial bias: the mean label, or its logit"},
    )
    pooling: Pooling = field(
        default="mean", metadata={"help": "how the ids of a multi-id feature become one vector"}
    )
    clusters: int = field(
        default=4, metadata={"help": "cbml: soft clusters that tasks fall into", "min": 1}
    )
    history: str = field(
        default="",
        metadata={
            "help": "din: the multi-id column of the behaviour history; "
            "the target is the single-id column of the same table"
        },
    )
    attention: tuple[int, ...] = field(
        default=(36,),
        metadata={
            "help": "din: hidden widths of the MLP that weighs the history's entries",
            "min": 1,
        },
    )


@dataclass(frozen=True)
class SparseColumn:
    """A column of ids and the table that they index."""

    name: str
    table: str


@dataclass(frozen=True)
class InputSizes:
    """How many columns of each kind a dataset has: F single-id, M multi-id, K dense.

    What the sparse ones are called is for models that treat one of them in a way of its own.
    """

    num_single: int
    num_multi: int
    num_dense: int
    single: tuple[SparseColumn, ...] = ()
    multi: tuple[SparseColumn, ...] = ()
