"""Finds what a reader must not miss: a run worse after adapting, or below a baseline."""

from collections.abc import Mapping, Sequence

from gmeta.evaluation.report.evaluation_schema import Caution, GroupEvaluation
from gmeta.metrics.metric_info import MetricInfo

# Without features and gradients: a model below this baseline is of no use.
BASELINE_NAME = "bias model"


def find_cautions(
    group: GroupEvaluation,
    run: str,
    plain: Sequence[str],
    infos: Mapping[str, MetricInfo],
    label: str,
) -> list[Caution]:
    """Return what is wrong with the adapted run in a group; `plain` names fine-tuned runs."""
    pairs = [
        (run, group.comparison(run, "after", run, "before"), "adapting makes it worse"),
        (
            BASELINE_NAME,
            group.comparison(run, "after", BASELINE_NAME, "after"),
            f"it is below the {BASELINE_NAME}",
        ),
    ]
    pairs += [
        (name, group.comparison(run, "after", name, "after"), f"it is below {name}, fine-tuned")
        for name in plain
    ]
    found = []
    for minus_run, comparison, what in pairs:
        metrics = comparison.metrics if comparison else {}
        worse = [name for name, difference in metrics.items() if difference.verdict == "worse"]
        if worse:
            named = ", ".join(infos[name].label for name in worse)
            of_label = f" of {label}" if label else ""
            text = f"{group.name}: {what}, by {named}{of_label}"
            found.append(Caution(group.name, minus_run, tuple(worse), text, label))
    return found
