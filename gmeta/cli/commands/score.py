"""`gmeta score`."""

from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands.rank_launch import faster_import
from gmeta.errors import UserError
from gmeta.platform.files.local_paths import check_local


def score(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="EXPORT", help="folder that `gmeta export` wrote, or a full version"
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            metavar="DATASET|STREAM[:NUMBER]",
            help="what to score: a dataset, or an increment (default: the newest)",
        ),
    ],
    splits: Annotated[
        list[str] | None, typer.Option("--split", help="split to score; repeatable. Default: all")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the scores")] = None,
) -> None:
    """Score an exported model on a prepared dataset, as it would answer when served.

    gmeta score channels/clicks/versions/00000001 --on streams/clicks:7

    It adapts to each task's support rows and predicts the query rows; values that it never saw are
    unknown to it. For a report with intervals and baselines there is `gmeta evaluate RUN --on`."""
    if out is not None:
        check_local("--out", out)
    if not model.is_dir():
        raise UserError(
            f"{model} is no folder: an exported model is needed. Give a folder that `gmeta export` "
            "wrote, or CHANNEL/versions/NUMBER of a full version"
        )
    # Late: loading torch takes seconds, and a wrong option is reported at once.
    with faster_import():
        from gmeta.cli.commands.work.export_scores import score_export
    score_export(model, on, splits or [], out)
