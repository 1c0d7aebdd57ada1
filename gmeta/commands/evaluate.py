"""`gmeta evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from gmeta.commands import on_ranks
from gmeta.config import TrainConfig
from gmeta.errors import UserError
from gmeta.files.local import check_local
from gmeta.runs.folder import RunFolder


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
) -> None:
    """Adapt to every unseen task's support set and score its query set, before and after.

    gmeta evaluate runs/demo/maml --against runs/demo/plain

    Writes evaluation.json, a self-contained report.html, its pictures and the predictions; prints a
    table.
    """
    out = out or run / "evaluation"
    check_local("--out", out)
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
        arguments += ["--out", str(out)]
        # No restarts: an evaluation keeps nothing that a second try could go on from.
        on_ranks.start(arguments, nproc_per_node, master_port=0, max_restarts=0)
        return
    # Loading torch takes seconds: not before the folders are known to be right.
    with on_ranks.importing():
        from gmeta.commands.work.evaluate import evaluate_on_rank
    evaluate_on_rank(roots, splits or [], out, config)


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
