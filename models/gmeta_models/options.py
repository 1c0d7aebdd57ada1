"""The keys of [model.options], by model; without torch, so that a config is checked at once."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gmeta_keys import Wording, key
from gmeta_keys.options import parse_options
from gmeta_models.model_config import ModelConfig

OPTION_WORDING = Wording(
    ValueError,
    "",
    "known keys",
    lambda name, hint, value: f"{name} = {value!r} is not of the type {hint}. Correct it",
)


@dataclass(frozen=True)
class DlrmOptions:
    """Options of DLRM."""

    bottom: tuple[int, ...] = key(
        (64,), "dlrm: hidden widths of the MLP over the dense columns", min=1
    )
    interaction: Literal["dot", "cat"] = key(
        "dot", "dlrm: pairwise dot products, or plain concatenation"
    )


@dataclass(frozen=True)
class CbmlOptions:
    """Options of CBML."""

    clusters: int = key(4, "cbml: soft clusters that tasks fall into", min=1)


@dataclass(frozen=True)
class DinOptions:
    """Options of DIN."""

    history: str = key("", "din: the multi-id column of the behaviour history")
    attention: tuple[int, ...] = key((36,), "din: hidden widths of the attention's MLP", min=1)


@dataclass(frozen=True)
class DcnOptions:
    """Options of DCN-V2."""

    cross_layers: int = key(3, "dcnv2: cross layers", min=1)
    cross_rank: int = key(
        0, "dcnv2: rank of the matrices of the cross layers; 0: they are whole", min=0
    )
    structure: Literal["stacked", "parallel"] = key(
        "stacked", "dcnv2: the MLP above the cross layers, or beside them"
    )


@dataclass(frozen=True)
class ExpertOptions:
    """Options of MMoE."""

    experts: int = key(4, "mmoe, ple: experts that all outputs share; ple: a level", min=1)
    expert: tuple[int, ...] = key((64,), "mmoe, ple: widths of the layers of an expert", min=1)


@dataclass(frozen=True)
class PleOptions(ExpertOptions):
    """Options of PLE."""

    own_experts: int = key(2, "ple: experts of each output alone, a level", min=1)
    levels: int = key(2, "ple: levels of experts", min=1)


MODEL_OPTIONS: dict[str, type | None] = {
    "cbml": CbmlOptions,
    "dcnv2": DcnOptions,
    "deepfm": None,
    "din": DinOptions,
    "dlrm": DlrmOptions,
    "dot": None,
    "melu": None,
    "mmoe": ExpertOptions,
    "ple": PleOptions,
}


@dataclass(frozen=True)
class HeadOptions:
    """What all encoders of several heads have."""

    heads: int = key(2, "sasrec, hstu, sim: heads, which divide model.embedding_dim", min=1)


@dataclass(frozen=True)
class TransformerOptions(HeadOptions):
    """Options of HSTU."""

    blocks: int = key(2, "sasrec, hstu: layers", min=1)
    dropout: float = key(0.0, "sasrec, hstu: share of units left out", min=0.0, max=0.9)


@dataclass(frozen=True)
class SasrecOptions(TransformerOptions):
    """Options of SASRec."""

    attention: Literal["softmax", "linear"] = key("softmax", "sasrec: how events are weighed")


@dataclass(frozen=True)
class SimOptions(HeadOptions):
    """Options of SIM."""

    search: Literal["category", "hash"] = key(
        "category", "sim: events of the target's category, or with nearly its bits"
    )
    category: str = key("", "sim: the events' column to search by; empty: their last")
    newest: int = key(100, "sim: most events that are found for a row", min=1)


EVENT_OPTIONS: dict[str, type | None] = {
    "none": None,
    "din": None,
    "hstu": TransformerOptions,
    "sasrec": SasrecOptions,
    "sim": SimOptions,
}


def event_options(config: ModelConfig, wording: Wording = OPTION_WORDING) -> Any:
    """Return the options of a config's encoder of events; None if it has none. Raises
    wording.error: see with_all_options."""
    kind, owner = EVENT_OPTIONS[config.events], f"model.events = {config.events!r}"
    given = config.event_options
    return parse_options(kind, given, EVENT_OPTIONS, wording, "model.event_options.", owner)


def with_all_options(config: ModelConfig, wording: Wording) -> ModelConfig:
    """Return the config with every option of its model and its encoder of events. Raises
    wording.error: an option is unknown, of a wrong type, or outside its bounds."""
    of_events = event_options(config, wording)
    config = replace(config, event_options={} if of_events is None else asdict(of_events))
    if config.name not in MODEL_OPTIONS:
        # Another package's model: its options are checked once its code is loaded.
        return config
    kind = MODEL_OPTIONS[config.name]
    owner = f"model.name = {config.name!r}"
    options = parse_options(kind, config.options, MODEL_OPTIONS, wording, "model.options.", owner)
    return replace(config, options={} if options is None else asdict(options))
