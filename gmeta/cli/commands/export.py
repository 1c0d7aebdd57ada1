"""`gmeta export` and `gmeta predict`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from gmeta.cli.commands.rank_launch import faster_import
from gmeta.errors import UserError
from gmeta.platform.files.local_paths import check_local, check_replaceable
from gmeta.serving.table_format import TableFormat


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="folder of a training run; of an exported model for the other formats, too"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="new folder for the model")],
    runtime: Annotated[
        Literal["gmeta", "torch", "onnx", "triton"],
        typer.Option(
            "--format",
            help="for gmeta itself, programs of torch.export, an ONNX model, or a model of a "
            "Triton repository",
        ),
    ] = "gmeta",
    tables: Annotated[
        TableFormat | None,
        typer.Option(
            help="embedding tables: float32 (as trained, the default), half the size, or a scale a "
            "row and int8"
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="checkpoint to export; default: the newest, with early stopping the best"
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

    gmeta export runs/demo/maml exports/clicks --tables int8
    gmeta export exports/clicks programs/clicks --format onnx

    gmeta export runs/day-2 deltas/day-2 --since channels/clicks"""
    check_local("OUT", out)
    if since is not None:
        check_local("--since", since)
    if runtime != "gmeta" and since is not None:
        raise UserError(
            f"--since writes what changed for gmeta itself: --format {runtime} has no deltas. "
            "Leave one of them out"
        )
    # Late: loading torch takes seconds, and a wrong option is reported at once.
    with faster_import():
        from gmeta.cli.commands.work.model_export import (
            export_changes,
            export_for_runtime,
            export_full,
        )
    if runtime != "gmeta":
        export_for_runtime(run, out, runtime, tables, step, overwrite)
    elif since is not None:
        export_changes(run, out, since, tables or "float32", step, overwrite)
    else:
        export_full(run, out, tables or "float32", step, overwrite)


def predict(
    model: Annotated[Path, typer.Argument(help="folder that `gmeta export` wrote")],
    support: Annotated[
        str,
        typer.Argument(
            metavar="SUPPORT.parquet",
            help="labelled rows to adapt by, Parquet, CSV or JSON lines: a path or any URL, a "
            "glob, a folder, or several of them with commas between",
        ),
    ],
    query: Annotated[
        str, typer.Argument(metavar="QUERY.parquet", help="rows to predict, given in the same way")
    ],
    out: Annotated[
        Path,
        typer.Option(help="file for QUERY's rows with their predictions: .parquet, .pq or .csv"),
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

    gmeta predict exports/clicks support.parquet query.parquet --out predictions.parquet

    The columns are those that prepare was given; the task column says which rows belong together.
    OUT holds QUERY's rows in their order, with the columns prediction, prediction_before (without
    adaptation) and support_rows. Files may be larger than memory: their rows are spooled by task
    beside OUT, encoded."""
    check_local("--out", out)
    check_replaceable(out, [("SUPPORT", support), ("QUERY", query)], overwrite)
    if out.suffix not in ("", ".parquet", ".pq", ".csv"):
        raise UserError(
            f"--out = {str(out)!r} ends with {out.suffix}: .parquet, .pq and .csv can be written. "
            "Name a file that ends with one of them"
        )
    # As above.
    with faster_import():
        from gmeta.cli.commands.work.row_predictions import predict_rows
    predict_rows(model, support, query, out, allow_no_support, verify)
