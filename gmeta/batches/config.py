"""What can be chosen about training batches; the [augment] section of a training config."""

from dataclasses import dataclass

from gmeta_keys import key


@dataclass(frozen=True)
class AugmentConfig:
    """How training batches differ from the stored ones."""

    resplit_support: bool = key(
        False, "draw every task's support rows anew each epoch; not for a split by time"
    )
    min_support_share: float = key(
        0.2, "resplit_support: smallest share of a task's rows that support it", min=0.0, max=1.0
    )
    max_support_share: float = key(0.8, "resplit_support: largest such share", min=0.0, max=1.0)
    oov_dropout: float = key(
        0.0,
        "probability that an id counts as unknown for a whole step, as new ids will",
        min=0.0,
        max=1.0,
    )
    oov_tables: tuple[str, ...] = key((), "tables whose ids oov_dropout may take; []: all of them")
