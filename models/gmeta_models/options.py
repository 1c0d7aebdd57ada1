"""The keys of [model.options], by model; without torch, so that a config is checked at once."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from gmeta_keys import Wording, key
from gmeta_keys.options import parse_options
from gmeta_models.model_config import ModelConfig


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


def with_all_options(config: ModelConfig, wording: Wording) -> ModelConfig:
    """Return the config with every option of its model. Raises wording.error: an option is unknown,
    of a wrong type, or outside its bounds."""
    if config.name not in MODEL_OPTIONS:
        # Another package's model: its options are checked once its code is loaded.
        return config
    kind = MODEL_OPTIONS[config.name]
    owner = f"model.name = {config.name!r}"
    options = parse_options(kind, config.options, MODEL_OPTIONS, wording, "model.options.", owner)
    return replace(config, options={} if options is None else asdict(options))
