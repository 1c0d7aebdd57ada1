"""What can be chosen about the inner loop; the [algorithm] section of a training config."""

from dataclasses import dataclass, field
from typing import Literal

InnerPath = Literal["auto", "low_rank", "materialised"]
LearnedRates = Literal["layer", "output", "weight"]
PLAIN = "none"


@dataclass(frozen=True)
class AlgorithmConfig:
    """How the model adapts to a task. `none` trains without an inner loop and adapts only in
    evaluation.
    """

    name: str = field(
        default="maml",
        metadata={
            "help": "maml (second order), fomaml (first order), anil, reptile, metasgd, "
            "none (plain training, the baseline)"
        },
    )
    inner_steps: int = field(
        default=1, metadata={"help": "k: gradient steps on the support set", "min": 1}
    )
    inner_lr: float = field(
        default=0.05,
        metadata={"help": "rate of the inner steps; metasgd: where its rates start", "min": 0.0},
    )
    learned_rates: LearnedRates = field(
        default="output",
        metadata={
            "help": "metasgd: one rate for each layer (and table), each of its outputs "
            "(and the table's columns), or each of its weights"
        },
    )
    support_prior: float = field(
        default=0.0,
        metadata={
            "help": "rows of doubt: n support rows move a task by n / (n + this) of an inner step",
            "min": 0.0,
        },
    )
    adapt_layers: tuple[str, ...] = field(
        default=("*",),
        metadata={
            "help": "glob patterns over the model's linear layers; [] adapts none; "
            "anil: the head alone"
        },
    )
    adapt_embeddings: bool = field(
        default=True,
        metadata={
            "help": "whether a task also adapts its own copy of the embedding rows it uses; "
            "anil: no"
        },
    )
    inner_path: InnerPath = field(
        default="auto",
        metadata={
            "help": "how a layer's adaptation is held: as factors (low_rank), or as a matrix a "
            "task (materialised); auto: whichever needs fewer multiply-adds"
        },
    )
    layer_paths: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": 'exceptions to inner_path, e.g. ["top.*=low_rank", "top.0=materialised"]; of '
            "two that match a layer the later counts"
        },
    )
