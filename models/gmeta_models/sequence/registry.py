"""The encoders of events by name."""

from gmeta_models.model_config import ModelConfig
from gmeta_models.sequence.din_events import DinEvents
from gmeta_models.sequence.encoder import EventEncoder
from gmeta_models.sequence.hstu import HSTU
from gmeta_models.sequence.sasrec import SASRec
from gmeta_models.sequence.sim import SIM

ENCODERS: dict[str, type[EventEncoder]] = {
    "din": DinEvents,
    "hstu": HSTU,
    "sasrec": SASRec,
    "sim": SIM,
}


def build_encoder(config: ModelConfig, num_numbers: int) -> EventEncoder:
    """Return the encoder `config.events` for events of so many numbers each, freshly initialised.
    Raises ValueError: the heads do not divide the width."""
    if config.embedding_dim % config.event_heads:
        raise ValueError(
            f"model.event_heads = {config.event_heads} does not divide model.embedding_dim = "
            f"{config.embedding_dim}. Choose a divisor"
        )
    return ENCODERS[config.events](config, num_numbers)
