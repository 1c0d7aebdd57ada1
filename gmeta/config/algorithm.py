"""What can be chosen about the inner loop; the [algorithm] section of a training config."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from gmeta.config.settings import WORDING
from gmeta_keys import key, parse
from gmeta_keys.options import names_of, parse_options

InnerPath = Literal["auto", "low_rank", "materialised"]
LearnedRates = Literal["layer", "output", "weight"]
Options = TypeVar("Options")
PLAIN = "none"  # trained without an inner loop; evaluation still fine-tunes on the support set


@dataclass(frozen=True)
class AlgorithmConfig:
    """How the model adapts to a task. `none` trains without an inner loop and adapts only in
    evaluation."""

    name: str = key(
        "maml",
        "maml, fomaml, anil, reptile, metasgd, ridge, encoder, encoder_maml, metaemb or none "
        "(docs/algorithms.md); or one of your own (docs/extending.md)",
    )
    inner_steps: int = key(1, "k: gradient steps on the support set", min=1)
    inner_lr: float = key(
        0.05, "learning rate of the inner steps; metasgd: initial value of its rates", min=0.0
    )
    bias_rate: float = key(
        1.0, "inner rate of the last layer's bias, as a multiple of its layer's", min=0.0
    )
    support_prior: float = key(
        0.0,
        "n support rows scale a task's inner step, or an encoder's mean, by n / (n + "
        "support_prior)",
        min=0.0,
    )
    adapt_layers: tuple[str, ...] = key(
        ("*",), "glob patterns over the model's linear layers; [] adapts none"
    )
    adapt_embeddings: bool | tuple[str, ...] = key(
        True,
        "whether a task also adapts its own copy of the embedding rows it uses; a list: of "
        "these tables",
    )
    layer_paths: tuple[str, ...] = key(
        (),
        'how layers\' adaptation is held: low_rank or materialised, e.g. ["*=low_rank", '
        '"top.0=materialised"]',
    )
    plain_epochs: int = key(0, "first epochs of a run that are plain training", min=0)
    options: dict[str, Any] = key(dict, "keys of one algorithm alone, as [algorithm.options]")

    @property
    def train_base(self) -> bool:
        """Return whether model and tables learn too; False: only a part of the algorithm's own."""
        return bool(self.options.get("train_base", True))

    def with_options_of(self, kind: type | None) -> "AlgorithmConfig":
        """Return the config with every option of `kind`, a dataclass, or with none. Raises
        ConfigError: an option is unknown, of a wrong type, or outside its bounds."""
        owner = f"algorithm.name = {self.name!r}"
        options = parse_options(
            kind, self.options, ALGORITHM_OPTIONS, WORDING, "algorithm.options.", owner
        )
        # One of somebody's own may be made of parts of ours, which read theirs.
        kept = {} if self.name in ALGORITHM_OPTIONS else self.options
        return replace(self, options={**kept, **({} if options is None else asdict(options))})

    def options_of(self, kind: type[Options]) -> Options:
        """Return those of the config's options that are of the dataclass `kind`."""
        own = names_of(kind)
        given = {name: value for name, value in self.options.items() if name in own}
        return parse(kind, given, WORDING, "algorithm.options.")


@dataclass(frozen=True)
class MetaSgdOptions:
    """Those of Meta-SGD."""

    learned_rates: LearnedRates = key(
        "output", "metasgd: one rate for each layer, each of its outputs, or each of its weights"
    )


@dataclass(frozen=True)
class LearnedPartOptions:
    """Those of algorithms that learn a part beside the model."""

    cold_weight: float = key(
        0.1,
        "encoder, metaemb: share of the loss before adaptation in the outer loss",
        min=0.0,
        max=1.0,
    )
    train_base: bool = key(True, "encoder, metaemb: whether model and tables learn too")


@dataclass(frozen=True)
class EncoderOptions(LearnedPartOptions):
    """Those of the encoder."""

    encoder_hidden: tuple[int, ...] = key(
        (64, 32), "encoder: widths of what reads a support row", min=1
    )
    encoder_pooling: Literal["mean", "attention"] = key(
        "mean", "encoder: how a task's support rows become one vector"
    )
    encoder_modulation: Literal["film", "gate"] = key(
        "film", "encoder: film scales and shifts a layer's outputs, gate only scales them"
    )


@dataclass(frozen=True)
class MetaEmbOptions(LearnedPartOptions):
    """Those of Meta-Embedding."""

    content: tuple[str, ...] = key(
        (), "metaemb: columns that describe an id, such as an item's genre"
    )


ALGORITHM_OPTIONS: dict[str, type | None] = {
    **dict.fromkeys((PLAIN, "maml", "fomaml", "anil", "reptile", "ridge")),
    "metasgd": MetaSgdOptions,
    "encoder": EncoderOptions,
    "encoder_maml": EncoderOptions,
    "metaemb": MetaEmbOptions,
}
