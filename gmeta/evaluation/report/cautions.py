"""What a reader must not miss: adapting that makes a run worse, and a run that is below the bias
model or below plain training, fine-tuned on the same support rows."""

from collections.abc import Mapping, Sequence

from gmeta.evaluation.report.evaluation_schema import Caution, Comparison, GroupEvaluation
from gmeta.metrics.metric_info import MetricInfo

# The yardstick without features and gradients: nobody would use a model that is below it.
BASELINE_NAME = "bias model"


def find_cautions(
    group: GroupEvaluation,
    run: str,
    plain: Sequence[str],
    infos: Mapping[str, MetricInfo],
    label: str,
) -> list[Caution]:
    """Return what is wrong with the adapted run in a group, by the verdicts of the metrics of a
    label; `plain` names the baselines that are fine-tuned."""
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
        worse = _find_worse_metrics(comparison)
        if worse:
            named = ", ".join(infos[name].label for name in worse)
            of_label = f" of {label}" if label else ""
            text = f"{group.name}: {what}, by {named}{of_label}"
            found.append(Caution(group.name, minus_run, tuple(worse), text, label))
    return found


def _find_worse_metrics(comparison: Comparison | None) -> list[str]:
    """Return the metrics that are worse by their interval."""
    metrics = comparison.metrics if comparison else {}
    return [name for name, difference in metrics.items() if difference.verdict == "worse"]
