"""`gmeta evaluate` as a rank; rank 0 writes the report and says where."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gmeta.adaptation.config import PLAIN
from gmeta.batches.labels import scored_labels
from gmeta.batches.views import Shown
from gmeta.checkpoints.choice import best_not_kept
from gmeta.commands.screen import first_progress, print_result, screen, show_table
from gmeta.commands.work.rank import be_rank
from gmeta.config import TrainConfig, overridden
from gmeta.errors import UserError
from gmeta.evaluate import (
    checkpoint_of,
    drawn_once,
    evaluate_run,
    judged_by,
    splits_to_score,
    told_seen,
)
from gmeta.feeds.increment import data_of, newest_named, open_data, open_named
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.labels import ScoredLabel
from gmeta.parallel.ranks import Ranks, value_of_first
from gmeta.parallel.together import by_first
from gmeta.report.console import console_table
from gmeta.report.files import write
from gmeta.report.runs import EvaluatedRun
from gmeta.runs.adapting import ADAPTING_FILE, write_adapting
from gmeta.runs.folder import RunFolder
from gmeta.yardstick.candidates import Candidates, candidates_of
from gmeta.yardstick.measure import item_index, measure
from metaio.format.dataset import Dataset
from metaio.format.translation import translated
from metaio.prepare.raw_ids import lacking


@dataclass(frozen=True)
class Asked:
    """What the command line asks for: `overrides` change the first run's algorithm, and what is
    measured of all runs."""

    splits: list[str]
    overrides: list[str]
    item_column: str
    trees: bool
    draws: int = 1
    support_sizes: tuple[int, ...] = ()
    on: str = ""
    label: str = ""


def evaluate_on_rank(roots: list[Path], asked: Asked, out: Path, config: TrainConfig) -> None:
    """Score the runs at `roots` together with the other ranks, by the first run's `config`."""
    wanted = Shown(asked.draws, asked.support_sizes)

    def work(ranks: Ranks) -> None:
        # Folders of the same name in different places are told apart by their paths.
        short = len({root.name for root in roots}) == len(roots)
        for root in roots:
            checkpoint_of(RunFolder(root))
        dataset = open_data(config.data)
        label = _label(dataset, asked.label) or config.labels.judged
        configs = {root: RunFolder(root).read_config() for root in roots}
        own_data = {root: open_data(own.data) for root, own in configs.items()}
        for root, own in configs.items():
            judged_by(label, own.labels, own_data[root])
        chosen = overridden(config, asked.overrides)
        chosen = replace(chosen, labels=judged_by(label, chosen.labels, dataset))
        if chosen.evaluation.candidates:
            _check_same_items(own_data, chosen.evaluation.candidates)
        if asked.item_column:  # an error is reported before minutes are spent
            item_index(dataset, asked.item_column)
        # One for all runs and ranks, whatever lands in a stream meanwhile.
        named = value_of_first(newest_named(asked.on), ranks) if asked.on else ""
        on = translated(open_named(named), dataset) if named else None
        shown, note = drawn_once(wanted, on or dataset)
        notes = [one for one in (lacking(on or dataset), note) if one]
        data = chosen.data if on is None else data_of(chosen.data, on)
        splits = splits_to_score(data, on or dataset, asked.splits)
        names = {root: root.name if short else str(root) for root in roots}
        for root, name in names.items():
            notes += told_seen(name, RunFolder(root), own_data[root], on or own_data[root], splits)
        if ranks.rank == 0:
            for one in notes:
                screen(stderr=True).print(one)
        scoring = Scoring(chosen.loss_of(), chosen.evaluation)
        scored = scored_labels(chosen.labels, on or dataset)
        candidates = _candidates(scoring, scored, on or dataset, splits, asked.item_column, ranks)
        overrides_adapting = any(each.startswith("algorithm.") for each in asked.overrides)
        runs = []
        for root, name in names.items():
            with first_progress(f"scoring {name:.16}", ranks.rank) as advance:
                runs.append(
                    evaluate_run(
                        root,
                        name,
                        asked.splits,
                        ranks,
                        chosen.algorithm if overrides_adapting and root == roots[0] else None,
                        shown,
                        named,
                        candidates,
                        advance,
                        label,
                        chosen.evaluation,
                    )
                )
        if ranks.rank == 0:
            evaluated = [each for each in runs if each is not None]
            console = screen()
            screen(stderr=True).print("the runs are scored; now the baselines, from training rows")
            yardsticks = [
                measure(
                    chosen.data,
                    chosen.loss_of(one.name),
                    chosen.outer.huber_delta,
                    dataset,
                    splits,
                    asked.item_column,
                    asked.trees,
                    shown,
                    on,
                    candidates if one.is_judged else None,
                    one,
                )
                for one in scored_labels(chosen.labels, dataset)
            ]
            models = [model for found in yardsticks for model in found.models]
            told = dict.fromkeys(note for found in yardsticks for note in found.notes)
            paths = write(
                out,
                evaluated,
                models,
                [*told, *notes],
                lambda found: show_table(console, console_table(found)),
            )
            for root, each in zip(roots, evaluated, strict=True):
                _keep_chosen(root, each)
            evaluation = json.loads(Path(paths.evaluation_json).read_text())
            print_result({"report": paths.html, "evaluation": evaluation})
            for line in filter(None, (best_not_kept(RunFolder(root)) for root in roots)):
                screen(stderr=True).print(line)
            console.print(f"report: {paths.html}   figures: {paths.evaluation_json}")

    # A run that was trained on a GPU is evaluated on the device that is here.
    device = "cpu" if config.run.device == "cpu" else "auto"
    configs = [RunFolder(root).read_config().digest for root in roots]
    told = {**vars(asked), "the config of each RUN": configs}
    be_rank(device, config.run.collective_timeout_s, told, work)


def _keep_chosen(root: Path, run: EvaluatedRun) -> None:
    """Keep what validation chose for a run that adapts: `gmeta export` uses it."""
    if run.algorithm == PLAIN or not run.fine_tuning:
        return
    tuning = run.fine_tuning[0]
    (best,) = tuning.chosen
    told = {"metric": tuning.metric, "value": best.value, "chosen_on": tuning.split}
    try:
        write_adapting(RunFolder(root), run.step, best.inner_lr, best.inner_steps, **told)
    except OSError as error:
        screen(stderr=True).print(
            f"{root / ADAPTING_FILE} cannot be written ({error}): an export of this run adapts as "
            "its config says"
        )


def _label(dataset: Dataset, label: str) -> str:
    """Return the label asked for, "" for none. Raise UserError where the dataset has one label
    without a name."""
    if label and not dataset.features.labels:
        raise UserError(
            f"--label = {label!r}, but {dataset.url} has one label, which has no name. Leave it out"
        )
    return label


def _check_same_items(own_data: dict[Path, Dataset], candidates: int) -> None:
    """Raise UserError for sampled candidates of runs whose ids stand for other items, as in a run
    that was not trained on the dataset of the first."""
    (first, dataset), *others = own_data.items()
    for root, other in others:
        if other.fingerprint != dataset.fingerprint:
            raise UserError(
                f"evaluation.candidates = {candidates}, but run {root} was trained on {other.url} "
                f"({other.fingerprint[:12]}), {first} on {dataset.url} "
                f"({dataset.fingerprint[:12]}): the ids of one are other items to the other. "
                "Evaluate each run alone, or without candidates"
            )


def _candidates(
    scoring: Scoring,
    labels: Sequence[ScoredLabel],
    dataset: Dataset,
    splits: list[str],
    item_column: str,
    ranks: Ranks,
) -> Candidates | None:
    """Return what is sampled beside positive rows, made by rank 0 for all; None where nothing is.
    Collective."""
    if not (number := scoring.config.candidates):
        return None
    found: list[Candidates] = []

    def sample() -> None:
        (judged,) = (one for one in labels if one.is_judged)
        found.append(candidates_of(dataset, splits, number, scoring.threshold, item_column, judged))

    by_first(sample, ranks)
    return value_of_first(found[0] if found else None, ranks)
