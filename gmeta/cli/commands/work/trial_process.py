"""A trial of `gmeta tune` in a process of its own: trains one config and scores it."""

import gc
import math
import os
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import pyarrow.compute as pc
import torch

from gmeta.cli.commands.error_messages import WRONG_PATHS, format_error, reportable_errors
from gmeta.cli.commands.work.rank_process import run_as_rank
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.data.label_checks import scored_labels
from gmeta.data.opening import open_data
from gmeta.distributed.ranks import Ranks
from gmeta.errors import NotWrittenError
from gmeta.evaluation.baselines.predict_baselines import predict_baselines
from gmeta.evaluation.evaluate import evaluate_run
from gmeta.evaluation.validation import average_scores, score_predictions
from gmeta.metrics.catalogue import label_of
from gmeta.metrics.scores import evaluate_split
from gmeta.platform.numerics import choose_products
from gmeta.runs.build import check_on_data
from gmeta.runs.early_stop import make_early_stop, make_scoring
from gmeta.training import train
from gmeta.tuning.trials import TrialReport


def run_as_trial(part: str, config: dict[str, Any], log: str, place: int, says: Connection) -> None:
    """Do a part of a study: "check" a config, "train" and score a trial, or score the boosted
    "trees"; report to `says`, and end this process."""
    _leave_with_tune()
    if gpus := torch.cuda.device_count():
        # Trials that run at a time are spread over the GPUs.
        os.environ["LOCAL_RANK"] = str(place % gpus)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        # The file descriptors, not sys.stdout: native libraries print too.
        os.dup2(opened, number)
    os.close(opened)
    code = 0
    try:
        if part == "check":
            check_on_data(config_from_dict(config))
        elif part == "trees":
            says.send(score_trees(config_from_dict(config)))
        else:
            _train(config_from_dict(config), says)
    except reportable_errors() as error:
        line, code = format_error(error)
        sys.stderr.write(f"error: {line}\n")
        is_path = isinstance(error, WRONG_PATHS)
        unwritten = isinstance(error, NotWrittenError | OSError) and not is_path
        # Without the hint to resume of an error's notes: a trial is not resumed but tried again.
        failure = error.args[0] if isinstance(error, NotWrittenError) else line
        says.send(TrialReport(failure=failure, is_write_failure=unwritten))
    # A defect is not caught: the process ends with its traceback in the log, which the report
    # names.
    says.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # As gmeta.cli.main does: native threads of the libraries may abort an interpreter on its way
    # out.
    os._exit(code)


def _train(config: TrainConfig, says: Connection) -> None:
    def work(ranks: Ranks) -> None:
        root, splits = train(config, ranks).root, config.data.valid_splits
        # Products as in a process of its own, whatever run.precision is. The trained model lies in
        # reference cycles: without a collection a GPU would have to hold two.
        choose_products("float32", ranks.device)
        gc.collect()
        # At the rate and steps that validation chooses, not at the trial's: a plain run, which
        # never took an inner step, would be ranked by its luck with them.
        run = evaluate_run(root, root.name, splits, ranks)
        # A trial is one rank, which gets the rows.
        assert run is not None
        rows, dataset = run.predictions, open_data(config.data)
        of_split = {split: rows.filter(pc.equal(rows["split"], split)) for split in splits}
        scores = {
            split: score_predictions(rows, split, config, dataset).scores
            for split, rows in of_split.items()
        }
        score = average_scores(scores)[make_early_stop(config).metric]
        says.send(TrialReport(score, run.adapts_with))

    run = config.run
    run_as_rank(run.device, run.collective_timeout_s, {}, work)


def score_trees(config: TrainConfig) -> TrialReport:
    """Return the score of the boosted trees of `gmeta evaluate` on the validation splits, which
    choose them as they choose trials."""
    dataset, scoring = open_data(config.data), make_scoring(config)
    metric, label = label_of(make_early_stop(config).metric)
    if label not in ("", config.labels.judged):
        return TrialReport(failure="boosted trees: they predict the judged label alone")
    found = predict_baselines(
        config.data,
        scoring.fitted_loss,
        config.outer.huber_delta,
        dataset,
        splits := config.data.valid_splits,
        label=next(one for one in scored_labels(config.labels, dataset) if one.is_judged),
        neighbours=config.neighbours,
    )
    trees = next((one for one in found.models if one.short_name == "trees"), None)
    if trees is None:
        return TrialReport(failure=" ".join(found.notes))
    rows, scores = trees.drop_unknown().predictions, {}
    for split in splits:
        of_split = rows.filter(pc.equal(rows["split"], split))
        label_N, tree_N, task_N = (
            of_split[name].to_numpy() for name in ("label", "prediction", "task")
        )
        value = evaluate_split(label_N, tree_N, task_N, scoring, [metric])[metric].value
        scores[split] = {metric: None if math.isnan(value) else value}
    return TrialReport(average_scores(scores)[metric], trees.description)


def _leave_with_tune() -> None:
    """End this process when the one that started it ends, however that happens."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    # Without its parent a trial would go on training for no reader.
    threading.Thread(target=watch, name="leaves-with-tune", daemon=True).start()
