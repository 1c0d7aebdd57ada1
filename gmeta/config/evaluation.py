"""What of a model's predictions is measured; the [evaluation] section of a training config."""

from dataclasses import dataclass

from gmeta_keys import key

# 4 or 5 of 5 counts as liked, as in the MovieLens ranking literature.
LIKED = 4.0


@dataclass(frozen=True)
class EvaluationConfig:
    """Which metrics are reported, and what a good rating is."""

    metrics: tuple[str, ...] = key(
        (),
        "metrics to report, the first one is the headline; []: those of the loss "
        "(docs/metrics.md). Your own: package.module:Name",
    )
    positive_rating: float = key(
        0.0,
        "ratings from here on count as liked; 0: from 4 on, with a ranking loss all labels above 0",
    )
    candidates: int = key(
        0,
        "rank each positive query row among so many sampled items (docs/metrics.md); 0: among "
        "the task's query rows; -1: among all items that its events do not hold (model.name = dot)",
        min=-1,
        max=10_000,
    )
    unit: str = key("rating points", "unit of a rating, shown beside mae and rmse")
    # Of 1,000 with 10 query rows, MAE is known to 0.007 and differences to 0.002.
    tuning_tasks: int = key(
        1_000, "tasks of each validation split on which inner rate and steps are chosen", min=1
    )

    @property
    def ranks_all(self) -> bool:
        """Return whether each positive row is ranked among all items."""
        return self.candidates < 0
