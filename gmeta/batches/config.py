"""What can be chosen about training batches; the [augment] section of a training config."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AugmentConfig:
    """How training batches differ from the stored ones."""

    resplit_support: bool = field(
        default=False,
        metadata={
            "help": "draw every task's support rows anew each epoch; not for a split by time"
        },
    )
    min_support_share: float = field(
        default=0.2,
        metadata={
            "help": "resplit_support: least share of a task's rows that support it",
            "min": 0.0,
            "max": 1.0,
        },
    )
    max_support_share: float = field(
        default=0.8,
        metadata={"help": "resplit_support: greatest such share", "min": 0.0, "max": 1.0},
    )
    oov_dropout: float = field(
        default=0.0,
        metadata={
            "help": "chance that an id counts as unknown for a whole step, as new ids will",
            "min": 0.0,
            "max": 1.0,
        },
    )
    oov_tables: tuple[str, ...] = field(
        default=(),
        metadata={"help": "tables whose ids oov_dropout may take; []: all of them"},
    )
