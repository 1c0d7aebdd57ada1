"""Names and explanations of metrics, for people."""

from dataclasses import dataclass

from gmeta.metrics.terms import ECE_BINS, LOGLOSS_CLIP


@dataclass(frozen=True)
class MetricInfo:
    """A metric's label, direction, unit and explanation."""

    label: str
    higher_is_better: bool
    unit: str
    explanation: str


CANDIDATE_TEXTS = {
    "mrr": "1 / the rank of a positive row",
    "ndcg": "1 / log2(1 + the rank of a positive row), 0 beyond rank {k}",
    "hr": "Whether a positive row is among the {k} best",
    "p": "1 / {k} where a positive row is among the {k} best",
    "recall": "Whether a positive row is among the {k} best",
}
OVER_CANDIDATES = " of itself and {n}; mean over the positive rows; equal scores share their ranks."
_OVER_TASKS = "mean over the tasks that hold one; equal scores share their ranks"
# Of each family of metrics: its label, whether higher is better, and what it is.
TEXTS: dict[str, tuple[str, bool, str]] = {
    "auc": (
        "AUC",
        True,
        "Chance that a positive row scores above a negative one; 0.5 is guessing.",
    ),
    "gauc": (
        "GAUC",
        True,
        "AUC inside each task, averaged with the task's rows as weights, over the tasks that "
        "hold both classes (Zhou et al., Deep Interest Network, 2018).",
    ),
    "pr_auc": (
        "PR-AUC",
        True,
        "Average precision: the precision at each positive row, averaged over them; guessing "
        "earns the share of positive rows.",
    ),
    "logloss": (
        "Logloss",
        False,
        f"Mean negative log-likelihood, probabilities clipped at {LOGLOSS_CLIP:.1e}.",
    ),
    "ece": (
        "ECE",
        False,
        f"Expected calibration error: distance of predicted probability and share of positives, "
        f"over {ECE_BINS} bins of equal width, weighted by their rows (Guo et al. 2017).",
    ),
    "mae": ("MAE", False, "Mean absolute error over all rows."),
    "rmse": ("RMSE", False, "Root of the mean squared error over all rows."),
    "softmax": (
        "Softmax loss",
        False,
        "Cross-entropy of the softmax of a task's scores against its labels over their sum; mean "
        "over the tasks whose labels differ.",
    ),
    "pairwise": (
        "Pairwise loss",
        False,
        "Mean of log(1 + exp(lower - higher)) over a task's pairs of rows with different labels, "
        "of their scores; mean over the tasks that have such.",
    ),
    "mrr": ("MRR", True, f"1 / the rank of a task's best positive row; {_OVER_TASKS}."),
    "ndcg": (
        "nDCG@{k}",
        True,
        "DCG with gain = {gain}, discount log2(1 + rank), over the ideal order's; mean over tasks.",
    ),
    "hr": (
        "HR@{k}",
        True,
        f"Hit rate: whether a task's {{k}} best rows hold a positive one; {_OVER_TASKS}.",
    ),
    "p": ("P@{k}", True, f"Positive rows among a task's {{k}} best, over {{k}}; {_OVER_TASKS}."),
    "recall": (
        "Recall@{k}",
        True,
        f"Share of a task's positive rows among its {{k}} best; {_OVER_TASKS}.",
    ),
}
