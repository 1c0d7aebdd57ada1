"""The work of `gmeta evaluate` on each rank; rank 0 writes the report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from gmeta.cli.commands.console import make_console, print_result, show_progress, show_table
from gmeta.cli.commands.work.rank_process import run_as_rank
from gmeta.config.train_config import TrainConfig, overridden
from gmeta.data.label_checks import scored_labels
from gmeta.data.opening import data_config_for, open_by_name, open_data, resolve_newest
from gmeta.data.support_views import EvalProtocol
from gmeta.distributed.collective_errors import run_on_first
from gmeta.distributed.ranks import Ranks, broadcast_value
from gmeta.errors import UserError
from gmeta.evaluation.baselines.candidates import Candidates, make_candidates
from gmeta.evaluation.baselines.predict_baselines import find_item_index, predict_baselines
from gmeta.evaluation.evaluate import (
    checkpoint_of,
    choose_splits,
    describe_plain_best,
    describe_trained_splits,
    evaluate_run,
    limit_to_one_draw,
    with_judged_label,
)
from gmeta.evaluation.report.console_table import make_console_table
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun
from gmeta.evaluation.report.report_files import ReportPaths, write_report
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scored_label import ScoredLabel
from gmeta.runs.checkpoints.selected_checkpoint import best_not_kept
from gmeta.runs.chosen_adaptation import CHOSEN_ADAPTATION_FILE, write_chosen_adaptation
from gmeta.runs.early_stop import describe_choices, make_early_stop, make_scoring
from gmeta.runs.run_folder import RunFolder
from metaio.format.dataset import Dataset
from metaio.format.translation import translate_dataset
from metaio.prepare.episodes.raw_ids import describe_missing_ids


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of the command line; `overrides` are of the first run's algorithm and all metrics."""

    splits: list[str]
    overrides: list[str]
    item_column: str
    trees: bool
    draws: int = 1
    support_sizes: tuple[int, ...] = ()
    on: str = ""
    label: str = ""


def evaluate_on_rank(
    roots: list[Path], options: EvaluateOptions, out: Path, config: TrainConfig
) -> None:
    """Score the runs at `roots`, all ranks together; the first run's `config` decides how."""
    wanted_protocol = EvalProtocol(options.draws, options.support_sizes)

    def work(ranks: Ranks) -> None:
        # Runs in folders of one name are distinguished by their paths.
        short = len({root.name for root in roots}) == len(roots)
        for root in roots:
            # All runs are checked before the first of them is scored, which may take long.
            checkpoint_of(RunFolder(root))
        dataset = open_data(config.data)
        if options.label and not dataset.features.labels:
            raise UserError(
                f"--label = {options.label!r}, but {dataset.url} has one label, which has no name. "
                "Leave it out"
            )
        label = options.label or config.labels.judged
        configs = {root: RunFolder(root).read_config() for root in roots}
        own_data = {root: open_data(own.data) for root, own in configs.items()}
        for root, config_of_run in configs.items():
            with_judged_label(label, config_of_run.labels, own_data[root])
        chosen = overridden(config, options.overrides)
        chosen = replace(chosen, labels=with_judged_label(label, chosen.labels, dataset))
        if chosen.evaluation.candidates:
            _check_same_items(own_data, chosen.evaluation.candidates)
        # An unknown column is reported before minutes are spent.
        if options.item_column:
            find_item_index(dataset, options.item_column)
        # Rank 0 decides: a stream may get an increment meanwhile, and all ranks and runs must score
        # one.
        increment_name = broadcast_value(resolve_newest(options.on), ranks) if options.on else ""
        on = translate_dataset(open_by_name(increment_name), dataset) if increment_name else None
        protocol, note = limit_to_one_draw(wanted_protocol, on or dataset)
        notes = [one for one in (describe_missing_ids(on or dataset), note) if one]
        data = chosen.data if on is None else data_config_for(chosen.data, on)
        splits = choose_splits(data, on or dataset, options.splits)
        names = {root: root.name if short else str(root) for root in roots}
        for root, name in names.items():
            notes += describe_trained_splits(
                name, RunFolder(root), own_data[root], on or own_data[root], splits
            )
        if ranks.rank == 0:
            for one in notes:
                make_console(stderr=True).print(one)
        scoring = Scoring(chosen.loss_of(), chosen.evaluation)
        scored = scored_labels(chosen.labels, on or dataset)
        candidates = _sample_candidates(
            scoring, scored, on or dataset, splits, options.item_column, ranks
        )
        overrides_adapting = any(each.startswith("algorithm.") for each in options.overrides)
        runs = []
        shown, judged_by = (protocol, increment_name, candidates), (label, chosen.evaluation)
        for root, name in names.items():
            # The others adapt as their own configs and validation say.
            adapting = chosen.algorithm if overrides_adapting and root == roots[0] else None
            with show_progress(f"scoring {name:.16}", ranks.rank) as advance:
                run = evaluate_run(
                    root, name, options.splits, ranks, adapting, *shown, advance, *judged_by
                )
            runs.append(run)
        if ranks.rank == 0:
            evaluated = [each for each in runs if each is not None]
            console = make_console()
            make_console(stderr=True).print(
                "the runs are scored; now the baselines, from training rows"
            )
            # Candidates are ranked by the judged label alone.
            common = dataset, splits, options.item_column, options.trees, protocol, on
            # The trees have the inputs of the run that has most of them.
            inputs = (own.neighbours for own in configs.values() if own.neighbours.column)
            neighbours = next(inputs, chosen.neighbours)
            baselines = [
                predict_baselines(
                    chosen.data,
                    make_scoring(chosen, one.name).fitted_loss,
                    chosen.outer.huber_delta,
                    *common,
                    candidates if one.is_judged else None,
                    one,
                    neighbours,
                )
                for one in scored_labels(chosen.labels, dataset)
            ]
            models = [model for baseline in baselines for model in baseline.models]
            baseline_notes = dict.fromkeys(note for found in baselines for note in found.notes)
            paths = write_report(
                out,
                evaluated,
                models,
                [
                    _describe_choices(config, make_scoring(chosen)),
                    *filter(None, map(describe_plain_best, evaluated)),
                    *baseline_notes,
                    *notes,
                ],
                lambda found: show_table(console, make_console_table(found)),
            )
            for root, each in zip(roots, evaluated, strict=True):
                _save_choice(root, each)
            _print_outcome(roots, paths, console)

    # A run that was trained on a GPU may be evaluated where there is none.
    device = "cpu" if config.run.device == "cpu" else "auto"
    configs = [RunFolder(root).read_config().digest for root in roots]
    shared_options = {**vars(options), "the config of each RUN": configs}
    run_as_rank(device, config.run.collective_timeout_s, shared_options, work)


def _describe_choices(config: TrainConfig, scoring: Scoring) -> str:
    valid_splits, early_stop = config.data.valid_splits, make_early_stop(config)
    standardises, loss_name = config.labels.standardise, config.loss_name()
    return describe_choices(scoring, early_stop, valid_splits, standardises, loss_name)


def _print_outcome(roots: list[Path], paths: ReportPaths, console: Console) -> None:
    # As in the file, where an undefined number is null.
    evaluation = json.loads(Path(paths.evaluation_json).read_text("utf-8"))
    print_result(report=paths.html, evaluation=evaluation)
    for line in filter(None, (best_not_kept(RunFolder(root)) for root in roots)):
        make_console(stderr=True).print(line)
    console.print(f"report: {paths.html}   figures: {paths.evaluation_json}")


def _save_choice(root: Path, run: EvaluatedRun) -> None:
    # A plain run without validation chooses one for each half of the tasks, and none for new ones.
    if not run.fine_tuning or len(run.fine_tuning[0].chosen) > 1:
        return
    tuning = run.fine_tuning[0]
    (best,) = tuning.chosen
    choice = {"metric": tuning.metric, "value": best.value, "chosen_on": tuning.split}
    try:
        write_chosen_adaptation(
            RunFolder(root), run.step, best.inner_lr, best.inner_steps, **choice
        )
    # A run whose folder cannot be written is evaluated all the same: only its exports lack the
    # choice.
    except OSError as error:
        make_console(stderr=True).print(
            f"{root / CHOSEN_ADAPTATION_FILE} cannot be written ({error}): an export of this run "
            "adapts as its config says"
        )


def _check_same_items(own_data: dict[Path, Dataset], candidates: int) -> None:
    """Raise UserError for sampled candidates of runs that were trained on different datasets."""
    (first, dataset), *others = own_data.items()
    for root, other in others:
        # An id is another item in another dataset, so the candidates would differ.
        if other.fingerprint != dataset.fingerprint:
            raise UserError(
                f"evaluation.candidates = {candidates}, but run {root} was trained on {other.url} "
                f"({other.fingerprint[:12]}), {first} on {dataset.url} "
                f"({dataset.fingerprint[:12]}): the ids of one are other items to the other. "
                "Evaluate each run alone, or without candidates"
            )


def _sample_candidates(
    scoring: Scoring,
    labels: Sequence[ScoredLabel],
    dataset: Dataset,
    splits: list[str],
    item_column: str,
    ranks: Ranks,
) -> Candidates | None:
    """Return what rank 0 draws beside positive rows; None without candidates. Collective."""
    if (number := scoring.config.candidates) <= 0:
        return None
    sampled: list[Candidates] = []

    def sample() -> None:
        (judged,) = (one for one in labels if one.is_judged)
        sampled.append(
            make_candidates(dataset, splits, number, scoring.threshold, item_column, judged)
        )

    run_on_first(sample, ranks)
    return broadcast_value(sampled[0] if sampled else None, ranks)
