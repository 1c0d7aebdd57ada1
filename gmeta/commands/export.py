"""`gmeta export` and `gmeta predict`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gmeta.errors import UserError
from gmeta.files.local import check_local


class Tables(StrEnum):
    """How an exported model holds its embedding tables."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"


def export(
    run: Annotated[Path, typer.Argument(help="folder of a training run")],
    out: Annotated[Path, typer.Argument(help="new folder for the model")],
    tables: Annotated[
        Tables,
        typer.Option(help="embedding tables: as trained, half the size, or a scale a row and int8"),
    ] = Tables.FLOAT32,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="checkpoint to export; default: the newest, with early stopping the best",
        ),
    ] = None,
    since: Annotated[
        Path | None,
        typer.Option(help="channel: write only what changed since the version that it serves"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the exported model at OUT")
    ] = False,
) -> None:
    """Make a trained run one folder that adapts and predicts alone: gmeta.load(OUT).

    gmeta export runs/demo/maml models/clicks --tables int8

    gmeta export runs/day-2 deltas/day-2 --since channels/clicks
    """
    check_local("OUT", out)
    if since is not None:
        check_local("--since", since)
    # Loading torch takes seconds: not before the options are known to be right.
    from gmeta.commands.work.export import export_model

    if since is None:
        export_model(run, out, tables.value, step, overwrite)
        return
    from gmeta.commands.work.delivery import export_changes

    export_changes(run, out, since, tables.value, step, overwrite)


def predict(
    model: Annotated[Path, typer.Argument(help="folder that `gmeta export` wrote")],
    support: Annotated[
        str, typer.Argument(metavar="SUPPORT.parquet", help="labelled rows to adapt by, any URL")
    ],
    query: Annotated[str, typer.Argument(metavar="QUERY.parquet", help="rows to predict, any URL")],
    out: Annotated[
        Path, typer.Option(help="Parquet file for QUERY's rows with their predictions")
    ] = Path("predictions.parquet"),
    allow_no_support: Annotated[
        bool,
        typer.Option(
            "--allow-no-support", help="predict tasks without support rows, without adaptation"
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="check the model's checksums before use, which reads all of it")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the file at --out")
    ] = False,
) -> None:
    """Adapt to every task of QUERY by its rows in SUPPORT, and predict its rows.

    gmeta predict models/clicks support.parquet query.parquet --out predictions.parquet

    The columns are those that prepare was given; the task column says which rows belong together.
    OUT holds QUERY's rows in their order, with the columns prediction, prediction_before (without
    adaptation) and support_rows.
    """
    check_local("--out", out)
    if out.is_dir():
        raise UserError(f"--out = {str(out)!r} is a folder: a file is needed. Name one in it")
    if out.suffix not in ("", ".parquet", ".pq"):
        raise UserError(
            f"--out = {str(out)!r} ends with {out.suffix}: what is written is Parquet. Name a file "
            "that ends with .parquet, and convert it behind"
        )
    for what, url in (("SUPPORT", support), ("QUERY", query)):
        if out.exists() and Path(url).exists() and out.samefile(url):
            raise UserError(
                f"--out = {str(out)!r} is {what}, whose rows would be replaced. Name another file"
            )
    if out.exists() and not overwrite:
        raise UserError(
            f"--out = {str(out)!r} exists already. Name another file, or pass --overwrite to "
            "replace it"
        )
    from gmeta.commands.work.predict import predict_rows

    predict_rows(model, support, query, out, allow_no_support, verify)
