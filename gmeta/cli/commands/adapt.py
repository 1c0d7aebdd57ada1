"""`gmeta adapt`: writes the states of many tasks, adapted ahead of time."""

from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands.rank_launch import faster_import
from gmeta.errors import UserError
from gmeta.platform.files.local_paths import check_local, check_replaceable


def adapt(
    model: Annotated[Path, typer.Argument(help="folder that `gmeta export` wrote")],
    support: Annotated[
        list[str],
        typer.Argument(
            metavar="SUPPORT...",
            help="labelled rows to adapt by, Parquet, CSV or JSON lines: paths, globs, folders, "
            "any URLs",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Parquet file for the adapted tasks")] = Path(
        "states.parquet"
    ),
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="processes that adapt, over the same mapped tables")
    ] = 1,
    verify: Annotated[
        bool, typer.Option(help="check the model's checksums before use, which reads all of it")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the file at --out")
    ] = False,
) -> None:
    """Adapt to every task of SUPPORT, and write each task's state, which model.task(STATE) reads.

    gmeta adapt exports/clicks logs/*.parquet --out states.parquet --processes 8

    The columns are those that prepare was given; the task column says which rows belong together,
    wherever they stand. OUT has a row for each task, in no order: task, state (bytes that belong
    to this very export) and rows. Memory does not grow with the number of tasks; rows wait in a
    hidden folder beside OUT."""
    check_local("--out", out)
    check_replaceable(out, [("a file of SUPPORT", url) for url in support], overwrite)
    if out.suffix not in (".parquet", ".pq"):
        raise UserError(
            f"--out = {str(out)!r} ends with {out.suffix or 'nothing'}: what is written is "
            "Parquet. Name a file that ends with .parquet"
        )
    # Late: loading torch takes seconds, and a wrong option is reported at once.
    with faster_import():
        from gmeta.cli.commands.work.adapt_support import adapt_and_report
    adapt_and_report(model, support, out, processes, verify)
