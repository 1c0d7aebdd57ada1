"""`gmeta evaluate`."""

import difflib
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands import rank_launch as on_ranks
from gmeta.cli.commands.overrides import METAVAR, complete_override
from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.train_config import TrainConfig, overridden
from gmeta.distributed.stopping import end_with_agent
from gmeta.errors import UserError
from gmeta.metrics.catalogue import Scoring, predicts_alike
from gmeta.platform.files.local_paths import check_local
from gmeta.runs.run_folder import RunFolder
from gmeta.runs.trusted_names import read_trusted_config

# Each is one more pass over the split, and as many more predictions in memory.
MOST_DRAWS = 1_000
MOST_SIZES = 20
# Keys of the inner loop on which no trained weight depends.
FREE_KEYS = ("inner_lr", "inner_steps", "support_prior", "adapt_layers", "adapt_embeddings")


def evaluate(
    run: Annotated[Path, typer.Argument(help="folder of a training run")],
    against: Annotated[
        list[Path] | None,
        typer.Option(help="folder of a run to compare with, e.g. the plain baseline; repeatable"),
    ] = None,
    splits: Annotated[
        list[str] | None,
        typer.Option("--split", help="split to score; repeatable. Default: the config's"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the report; default: RUN/evaluation")
    ] = None,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="ranks to start on this machine")] = 1,
    draws: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_DRAWS,
            help="draws of every task's support and query rows, the stored one first; metrics are "
            "means over them",
        ),
    ] = 1,
    support_sizes: Annotated[
        str,
        typer.Option(
            help="also score after adapting on no more than so many support rows, e.g. "
            "0,1,3,5,10,20: a curve"
        ),
    ] = "",
    item_column: Annotated[
        str, typer.Option(help="sparse column that is the item, for the bias model; default: found")
    ] = "",
    trees: Annotated[
        bool, typer.Option("--trees/--no-trees", help="also grow gradient-boosted trees to compare")
    ] = True,
    label: Annotated[
        str,
        typer.Option(
            help="of several labels the one whose tables and pictures are shown in full; default: "
            "labels.judged"
        ),
    ] = "",
    on: Annotated[
        str,
        typer.Option(
            metavar="DATASET|STREAM[:NUMBER]",
            help="score all splits of another dataset of the same columns, or of an increment "
            "(default: the newest), in place of the one that RUN was trained on",
        ),
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=METAVAR,
            autocompletion=complete_override,
            help="how RUN adapts here and what is measured, in place of its config: algorithm.*, "
            "evaluation.*",
        ),
    ] = None,
) -> None:
    """Adapt to every unseen task's support set and score its query set, before and after.

    gmeta evaluate runs/demo/maml --against runs/demo/plain

    Beside the runs stand a bias model (mean, item, task) and gradient-boosted trees; a plain run is
    fine-tuned at its best rate. Writes evaluation.json, a self-contained report.html, its pictures
    and the predictions; prints a table."""
    end_with_agent()  # first: the imports of a rank take seconds
    check_local("--out", out := out or run / "evaluation")
    sizes = _support_sizes(support_sizes)
    roots = [run, *(against or [])]
    # A run's config may name a metric or a loss of its own, which is code: it is not run untrusted.
    configs = [read_trusted_config(RunFolder(root)) for root in roots]
    _check_comparable(roots, configs, label)
    _check_writable(out)
    config, overrides = configs[0], overrides or []
    _check_overrides(run, config.algorithm.name, overrides)
    chosen = overridden(config, overrides)
    # Made for its checks alone: a metric that the loss does not allow is refused here.
    Scoring(chosen.loss_of(label), chosen.evaluation)
    if on_ranks.starts_ranks(nproc_per_node):
        arguments = ["evaluate", str(run), *overrides]
        arguments += [word for path in against or [] for word in ("--against", str(path))]
        arguments += [word for split in splits or [] for word in ("--split", split)]
        arguments += ["--out", str(out), "--trees" if trees else "--no-trees"]
        arguments += ["--item-column", item_column] if item_column else []
        arguments += ["--draws", str(draws), "--support-sizes", support_sizes, "--on", on]
        arguments += ["--label", label]
        # No restarts: an evaluation keeps nothing that a second try could go on from.
        on_ranks.start_ranks_here(arguments, nproc_per_node, master_port=0, max_restarts=0)
        return
    # Late: loading torch takes seconds, and a wrong folder is reported at once.
    with on_ranks.faster_import():
        from gmeta.cli.commands.work.evaluation_rank import EvaluateOptions, evaluate_on_rank
    options = EvaluateOptions(splits or [], overrides, item_column, trees, draws, sizes, on, label)
    evaluate_on_rank(roots, options, out, config)


def _check_writable(out: Path) -> None:
    """Raise UserError where the report's folder cannot be made or written."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out = {str(out)!r} is a file: a folder is needed. Choose another")
    # The folder may not exist yet: the nearest folder above it must be writable.
    place = next(each for each in (out, *out.parents) if each.exists())
    # Reported now, not after minutes of scoring.
    if not os.access(place, os.W_OK):
        raise UserError(f"{place} cannot be written: name another folder for the report by --out")


def _support_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a list such as 0,1,3, ascending. Raises UserError for anything else."""
    words = [word.strip() for word in text.split(",")] if text else []
    sizes = {int(word) for word in words if re.fullmatch("[0-9]{1,6}", word)}
    if len(sizes) < len(words) or len(sizes) > MOST_SIZES:
        raise UserError(
            f"--support-sizes = {text!r} is no list of support rows: up to {MOST_SIZES} different "
            "whole numbers below a million are allowed, with commas between them. "
            "Write e.g. 0,1,3,5,10,20"
        )
    return tuple(sorted(sizes))


def _check_overrides(run: Path, algorithm: str, overrides: list[str]) -> None:
    """Raise UserError for keys that an evaluation cannot change, before torch is loaded."""
    keys: tuple[str, ...] = FREE_KEYS
    if algorithm == "anil":
        # ANIL adapts its head alone: which layers adapt is not free.
        keys = FREE_KEYS[:3]
    if algorithm == "metasgd":
        # The rates of Meta-SGD, one for each weight that adapts, are trained weights of the run.
        keys = FREE_KEYS[1:3]
    allowed = [f"algorithm.{key}" for key in keys]
    allowed += [f"evaluation.{field.name}" for field in fields(EvaluationConfig)]
    for override in overrides:
        key = override.partition("=")[0]
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            raise UserError(
                f"{override!r} cannot be changed for the evaluation of {run}, trained with "
                f"{algorithm}: allowed are {', '.join(allowed)}. "
                + (f"Did you mean {near[0]}?" if near else "Train another run instead")
            )


def _check_comparable(roots: list[Path], configs: list[TrainConfig], label: str) -> None:
    """Raise UserError for runs that cannot be compared, before minutes are spent on scoring one."""
    loss = configs[0].loss_of(label)
    for root, config in zip(roots[1:], configs[1:], strict=True):
        if roots.count(root) > 1:
            raise UserError(
                f"{root} is named twice: a run says nothing beside itself. Leave one out"
            )
        loss_of_run = config.loss_of(label or configs[0].labels.judged)
        if not predicts_alike(loss_of_run, loss):
            raise UserError(
                f"run {root} was trained with loss {loss_of_run}, {roots[0]} with {loss}: their "
                "predictions mean different things. Compare runs of one loss"
            )
