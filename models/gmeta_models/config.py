"""What can be chosen about a model; the [model] section of a training config."""

from dataclasses import dataclass
from typing import Any, Literal

from gmeta_keys import key

Pooling = Literal["mean", "sum"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants; a model ignores what it has no use for."""

    name: str = key(
        "dlrm",
        "dlrm, melu, cbml or din; or a model of your own, by an entry point of the group "
        "gmeta.models or as package.module:Class",
    )
    # fbgemm's kernels read a row four values at a time.
    embedding_dim: int = key(
        16, "width of every embedding table; a multiple of 4", min=4, multiple=4
    )
    hidden: tuple[int, ...] = key(
        (256, 128), "widths of the layers between the interaction and the output", min=1
    )
    bottom: tuple[int, ...] = key(
        (64,), "dlrm: hidden widths of the MLP over the dense columns", min=1
    )
    interaction: Literal["dot", "cat"] = key(
        "dot", "dlrm: pairwise dot products, or plain concatenation"
    )
    output_bias: float = key(
        0.0, "added to the last layer's initial bias: the mean label, or its logit"
    )
    pooling: Pooling = key("mean", "how the ids of a multi-id feature become one vector")
    clusters: int = key(4, "cbml: soft clusters that tasks fall into", min=1)
    history: str = key(
        "",
        "din: the multi-id column of the behaviour history; "
        "the target is the single-id column of the same table",
    )
    attention: tuple[int, ...] = key(
        (36,), "din: hidden widths of the MLP that weighs the history's entries", min=1
    )
    options: dict[str, Any] = key(dict, "settings of a model of your own, by its `Options`")


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
