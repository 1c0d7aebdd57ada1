"""`gmeta evaluate`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from gmeta.commands import on_ranks
from gmeta.config import TrainConfig
from gmeta.errors import UserError
from gmeta.files.local import check_local
from gmeta.runs.folder import RunFolder

# Each is another pass over the split, and as many predictions in memory.
MOST_DRAWS = 1_000
MOST_SIZES = 20


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
) -> None:
    """Adapt to every unseen task's support set and score its query set, before and after.

    gmeta evaluate runs/demo/maml --against runs/demo/plain

    Writes evaluation.json, a self-contained report.html, its pictures and the predictions; prints a
    table.
    """
    out = out or run / "evaluation"
    check_local("--out", out)
    sizes = _support_sizes(support_sizes)
    roots = [run, *(against or [])]
    configs = [RunFolder(root).read_config() for root in roots]
    _check_comparable(roots, configs)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out = {str(out)!r} is a file: a folder is needed. Choose another")
    config = configs[0]
    if on_ranks.starts_ranks(nproc_per_node):
        arguments = ["evaluate", str(run)]
        arguments += [word for path in against or [] for word in ("--against", str(path))]
        arguments += [word for split in splits or [] for word in ("--split", split)]
        arguments += ["--out", str(out), "--draws", str(draws), "--support-sizes", support_sizes]
        # No restarts: an evaluation keeps nothing that a second try could go on from.
        on_ranks.start(arguments, nproc_per_node, master_port=0, max_restarts=0)
        return
    # Loading torch takes seconds: not before the folders are known to be right.
    with on_ranks.importing():
        from gmeta.commands.work.evaluate import evaluate_on_rank
    evaluate_on_rank(roots, splits or [], draws, sizes, out, config)


def _support_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of a list such as 0,1,3, rising.

    Raises:
        UserError: one is no whole number, or stands there twice.
    """
    words = [word.strip() for word in text.split(",")] if text else []
    sizes = {int(word) for word in words if re.fullmatch("[0-9]{1,6}", word)}
    if len(sizes) < len(words) or len(sizes) > MOST_SIZES:
        raise UserError(
            f"--support-sizes = {text!r} is no list of support rows: up to {MOST_SIZES} different "
            "whole numbers below a million are allowed, with commas between them. "
            "Write e.g. 0,1,3,5,10,20"
        )
    return tuple(sorted(sizes))


def _check_comparable(roots: list[Path], configs: list[TrainConfig]) -> None:
    """Refuse runs that cannot be compared, before minutes are spent on scoring one of them."""
    for root, config in zip(roots[1:], configs[1:], strict=True):
        if roots.count(root) > 1:
            raise UserError(
                f"{root} is named twice: a run says nothing beside itself. Leave one out"
            )
        if config.outer.loss != configs[0].outer.loss:
            raise UserError(
                f"run {root} was trained with loss {config.outer.loss}, {roots[0]} with "
                f"{configs[0].outer.loss}: their predictions mean different things. "
                "Compare runs of one loss"
            )
