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
        list[str] | None,
        typer.Argument(
            metavar="[SUPPORT...]",
            help="labelled rows to adapt by, Parquet, CSV or JSON lines: paths, globs, folders, "
            "any URLs",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Parquet file for the adapted tasks")] = Path(
        "states.parquet"
    ),
    from_states: Annotated[
        str,
        typer.Option(
            "--from",
            help="in place of SUPPORT: states that `gmeta adapt --with-support` wrote for another "
            "version, path, glob or URL",
        ),
    ] = "",
    with_support: Annotated[
        bool,
        typer.Option(
            "--with-support",
            help="states carry their support rows: other versions of the model renew them",
        ),
    ] = False,
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

    gmeta adapt exports/newer --from states.parquet --out renewed.parquet

    The columns are those that prepare was given; the task column says which rows belong together,
    wherever they stand. OUT has a row for each task, in no order: task, state (bytes that belong
    to this very export) and rows. Memory does not grow with the number of tasks; rows wait in a
    hidden folder beside OUT.

    --from adapts the tasks of states anew, for a newer version of the model, by the support rows
    that they carry."""
    if bool(support) == bool(from_states):
        raise UserError(
            "adapt takes SUPPORT, the rows to adapt by, or --from, states that carry theirs. Pass "
            "one of them"
        )
    inputs = [("a file of SUPPORT", url) for url in support or []]
    inputs += [("a file of --from", from_states)] if from_states else []
    check_local("--out", out)
    check_replaceable(out, inputs, overwrite)
    if out.suffix not in (".parquet", ".pq"):
        raise UserError(
            f"--out = {str(out)!r} ends with {out.suffix or 'nothing'}: what is written is "
            "Parquet. Name a file that ends with .parquet"
        )
    # Late: loading torch takes seconds, and a wrong option is reported at once.
    with faster_import():
        from gmeta.cli.commands.work.adapt_support import adapt_and_report
    adapt_and_report(model, support or [], from_states, out, processes, verify, with_support)
