"""The models by name; other packages add theirs by an entry point or an import path."""

from collections import ChainMap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from gmeta_keys.options import parse_options
from gmeta_keys.plugins import Registry, is_subclass_of
from gmeta_keys.translate_errors import format_foreign_error, translate_errors
from gmeta_models.cbml import CBML
from gmeta_models.dcnv2 import dcnv2
from gmeta_models.deepfm import DeepFM
from gmeta_models.din import DIN
from gmeta_models.dlrm import DLRM
from gmeta_models.dot import Dot
from gmeta_models.eval_mode import in_eval_mode
from gmeta_models.gated import head_layers, row_layers
from gmeta_models.inputs import RowInputs
from gmeta_models.melu import MeLU
from gmeta_models.mmoe import MMoE
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.model_outputs import split_output
from gmeta_models.options import MODEL_OPTIONS, OPTION_WORDING
from gmeta_models.ple import PLE

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cbml": CBML,
    "dcnv2": dcnv2,
    "deepfm": DeepFM,
    "din": DIN,
    "dlrm": DLRM,
    "melu": MeLU,
    "mmoe": MMoE,
    "ple": PLE,
}
# Those that read the state of an encoder of events alone.
RETRIEVAL_MODELS: dict[str, Callable[..., nn.Module]] = {"dot": Dot}
_OURS = ChainMap(MODELS, RETRIEVAL_MODELS)

NAMED_MODELS = Registry(
    "model.name", "gmeta.models", _OURS, "a subclass of torch.nn.Module", is_subclass_of(nn.Module)
)


def build_model(config: ModelConfig, sizes: InputSizes) -> nn.Module:
    """Return the model `config.name`, freshly initialised from torch's global generator. Raises
    ValueError: there is no such model, or the data has no column that it could read."""
    make = NAMED_MODELS.find(config.name)
    if sizes.num_single + sizes.num_multi == 0:
        raise ValueError(
            "the dataset has 0 sparse columns: a model needs at least one. "
            "Add a [[single]] or [[multi]] column to the schema and prepare again"
        )
    kind = MODEL_OPTIONS.get(config.name, getattr(make, "Options", None))
    owner = f"model.name = {config.name!r}"
    options = parse_options(
        kind, config.options, MODEL_OPTIONS, OPTION_WORDING, "model.options.", owner
    )
    with _translate_errors(config, "be made", "__init__"):
        model = make(config, sizes) if options is None else make(config, sizes, options)
    if not row_layers(model):
        raise ValueError(
            f"model.name = {config.name!r} has 0 linear layers that work on rows: at least one is "
            "needed, whose output is the row's. Give it a torch.nn.Linear"
        )
    with torch.no_grad():
        # Added to torch's draw, so that a bias of 0 changes nothing.
        for name, head in head_layers(model).items():
            if head.bias is not None:
                head.bias.add_(config.output_bias)
            elif config.output_bias:
                raise ValueError(
                    f"model.output_bias = {config.output_bias}, but {name}, the last layer, has no "
                    "bias. Give it one, or leave output_bias at 0"
                )
    return model


def _translate_errors(config: ModelConfig, what: str, where: str) -> AbstractContextManager[None]:
    # Only errors of other packages become one line: a traceback of ours is a bug of ours.
    if config.name in _OURS:
        return nullcontext()
    problem = f"model.name = {config.name!r} cannot {what}"
    advice = f"Mend its {where}; --verbose shows the line"
    return translate_errors(
        lambda error: ValueError(f"{problem}: {format_foreign_error(error)}. {advice}"), ValueError
    )


def check_outputs(model: nn.Module, config: ModelConfig, sizes: InputSizes) -> None:
    """Try a model of another package on a few rows. Raises ValueError: its outputs are unusable."""
    if config.name in _OURS:
        return
    _check_parameters(model, config)
    rows, wanted = 3, [3] + [sizes.outputs] * (sizes.outputs > 1)

    def outputs_of(last: float) -> torch.Tensor:
        # With a gradient, as fetched rows have one: a model that cuts it would learn nothing.
        value_N = torch.tensor([0.0] * (rows - 1) + [last]).requires_grad_()
        value_N11 = value_N.view(rows, 1, 1)
        inputs = RowInputs(
            single_NFD=value_N11.repeat(1, sizes.num_single, config.embedding_dim),
            bag_values_VD=value_N11.repeat(1, sizes.num_multi, config.embedding_dim).flatten(0, 1),
            bag_index_V=torch.arange(rows * sizes.num_multi),
            num_multi=sizes.num_multi,
            dense_NK=value_N11[:, 0].repeat(1, sizes.num_dense),
        )
        with _translate_errors(config, "score rows", "forward"), torch.enable_grad():
            output, auxiliary_N = split_output(model(inputs))
        shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        if not isinstance(output, torch.Tensor) or shape != wanted:
            raise ValueError(
                f"model.name = {config.name!r} makes {shape} of {rows} rows; a tensor of {wanted} "
                "is needed. Correct what its forward returns"
            )
        if not output.requires_grad:
            raise ValueError(
                f"model.name = {config.name!r} makes outputs without a gradient, and would learn "
                "nothing. Leave out .detach(), .item() and torch.no_grad() in its forward"
            )
        if auxiliary_N is None:
            return output
        if not isinstance(auxiliary_N, torch.Tensor) or list(auxiliary_N.shape) != [rows]:
            made = list(auxiliary_N.shape) if isinstance(auxiliary_N, torch.Tensor) else auxiliary_N
            raise ValueError(
                f"model.name = {config.name!r} makes the auxiliary loss {made} of {rows} rows; a "
                f"tensor of [{rows}] is needed. Correct the second of what its forward returns"
            )
        # Side by side: the loss of a row must not depend on other rows either.
        return torch.cat([output.view(rows, -1), auxiliary_N.unsqueeze(1)], dim=1)

    with in_eval_mode(model):  # as it is served
        outputs_of(0.0)
    # Trying the model must change neither the run's random numbers nor the model's buffers.
    drawn = torch.get_rng_state()
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]

    def others_of(last: float) -> torch.Tensor:
        output = outputs_of(last)
        torch.set_rng_state(drawn)
        for module, name, buffer, value in kept:
            setattr(module, name, buffer.copy_(value))
        return output[:-1]

    first, again, other = (others_of(last) for last in (0.0, 0.0, 1.0))
    # A model whose outputs differ anyway, as it draws numbers of its own, tells nothing.
    alike = partial(torch.allclose, first, rtol=1e-4, atol=1e-5, equal_nan=True)
    if alike(again) and not alike(other):
        raise ValueError(
            f"model.name = {config.name!r}: the output of a row changes with other rows, as "
            "BatchNorm makes it, so that a task would learn from others. Normalise each row alone, "
            "with LayerNorm or GroupNorm"
        )


def _check_parameters(model: nn.Module, config: ModelConfig) -> None:
    for name, weight in model.named_parameters():
        if weight.is_complex():
            raise ValueError(
                f"model.name = {config.name!r} has complex weights, {name}; real ones are needed. "
                "Keep pairs of real numbers, and take torch.view_as_complex of them in its forward"
            )
    with _translate_errors(config, "be saved", "get_extra_state"):
        state = model.state_dict()
    for name, kept in state.items():
        if not isinstance(kept, torch.Tensor):
            raise ValueError(
                f"model.name = {config.name!r} keeps {type(kept).__name__} as {name}; checkpoints "
                "hold tensors alone. Have get_extra_state return one, or leave it out"
            )
