"""The encoders of events by name."""

from collections.abc import Callable

from gmeta_models.model_config import ModelConfig
from gmeta_models.options import event_options
from gmeta_models.sequence.din_events import DinEvents
from gmeta_models.sequence.encoder import EventEncoder
from gmeta_models.sequence.hstu import HSTU
from gmeta_models.sequence.sasrec import SASRec
from gmeta_models.sequence.sim import SIM

ENCODERS: dict[str, Callable[..., EventEncoder]] = {
    "din": DinEvents,
    "hstu": HSTU,
    "sasrec": SASRec,
    "sim": SIM,
}


def build_encoder(config: ModelConfig, num_numbers: int) -> EventEncoder:
    """Return the encoder `config.events` for events of so many numbers each, freshly initialised.
    Raises ValueError: the heads do not divide the width."""
    options = event_options(config)
    heads = getattr(options, "heads", 1)
    if config.embedding_dim % heads:
        raise ValueError(
            f"model.event_options.heads = {heads} does not divide model.embedding_dim = "
            f"{config.embedding_dim}. Choose a divisor"
        )
    width = config.embedding_dim
    encoder = ENCODERS[config.events]
    return encoder(width, num_numbers) if options is None else encoder(width, num_numbers, options)
