"""`gmeta evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from gmeta.commands import on_ranks
from gmeta.config import TrainConfig, overridden
from gmeta.errors import UserError
from gmeta.files.local import check_local
from gmeta.runs.folder import RunFolder

# Of the inner loop, what says nothing about the weights that were trained.
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
    item_column: Annotated[
        str, typer.Option(help="sparse column that is the item, for the bias model; default: found")
    ] = "",
    trees: Annotated[
        bool, typer.Option("--trees/--no-trees", help="also grow gradient-boosted trees to compare")
    ] = True,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ALGORITHM.KEY=VALUE]...", help="how RUN adapts here, in place of its config"
        ),
    ] = None,
) -> None:
    """Adapt to every unseen task's support set and score its query set, before and after.

    gmeta evaluate runs/demo/maml --against runs/demo/plain

    Beside the runs stand a bias model (mean, item, task) and gradient-boosted trees; a plain run is
    fine-tuned at its best rate. Writes evaluation.json, a self-contained report.html, its pictures
    and the predictions; prints a table.
    """
    out = out or run / "evaluation"
    check_local("--out", out)
    roots = [run, *(against or [])]
    configs = [RunFolder(root).read_config() for root in roots]
    _check_comparable(roots, configs)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out = {str(out)!r} is a file: a folder is needed. Choose another")
    config, overrides = configs[0], overrides or []
    _check_overrides(run, config, overrides)
    if on_ranks.starts_ranks(nproc_per_node):
        arguments = ["evaluate", str(run), *overrides]
        arguments += [word for path in against or [] for word in ("--against", str(path))]
        arguments += [word for split in splits or [] for word in ("--split", split)]
        arguments += ["--out", str(out), "--trees" if trees else "--no-trees"]
        arguments += ["--item-column", item_column] if item_column else []
        # No restarts: an evaluation keeps nothing that a second try could go on from.
        on_ranks.start(arguments, nproc_per_node, master_port=0, max_restarts=0)
        return
    # Loading torch takes seconds: not before the folders are known to be right.
    with on_ranks.importing():
        from gmeta.commands.work.evaluate import Asked, evaluate_on_rank
    asked = Asked(splits or [], overrides, item_column, trees)
    evaluate_on_rank(roots, asked, out, config)


def _check_overrides(run: Path, config: TrainConfig, overrides: list[str]) -> None:
    """Refuse what evaluation cannot adapt with, before torch is loaded."""
    allowed: tuple[str, ...] = FREE_KEYS
    if config.algorithm.name == "anil":  # what adapts is its head
        allowed = FREE_KEYS[:3]
    if config.algorithm.name == "metasgd":
        # Its rates, one for each of what adapts, are weights of the run.
        allowed = FREE_KEYS[1:3]
    for override in overrides:
        name = override.partition("=")[0]
        if name not in [f"algorithm.{key}" for key in allowed]:
            raise UserError(
                f"{override!r} cannot be changed for the evaluation of {run}, trained with "
                f"{config.algorithm.name}: allowed are "
                f"{', '.join(f'algorithm.{key}' for key in allowed)}. Train another run instead"
            )
    overridden(config, overrides)


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
