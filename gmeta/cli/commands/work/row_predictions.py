"""The work of `gmeta predict`."""

from pathlib import Path

from gmeta.cli.commands.console import make_console, print_result, show_progress
from gmeta.errors import UserError
from gmeta.platform.files.local_paths import check_replaceable
from gmeta.serving.bulk.predict_files import predict_files, schema_of
from gmeta.serving.bulk.row_files import check_fits
from gmeta.serving.bulk.text_rows import open_rows
from gmeta.serving.model_loader import load
from gmeta.serving.outputs import list_outputs
from metaio.quantities import format_count


def predict_rows(
    model: Path, support: str, query: str, out: Path, allow_no_support: bool, verify: bool
) -> None:
    """Predict the rows of `query`, write them to `out` and print how many there were."""
    served = load(model, verify)
    with (
        open_rows([support], served.config, True) as support_rows,
        open_rows([query], served.config, False) as query_rows,
    ):
        sides = (("SUPPORT", support_rows.names), ("QUERY", query_rows.names))
        check_replaceable(out, [(what, name) for what, names in sides for name in names], True)
        for name in schema_of(list_outputs(served.config)).names:
            if name in query_rows.schema.names:
                raise UserError(
                    f"{query} has a column {name} already: the output would have two of them. "
                    "Rename or drop it"
                )
        check_fits(query_rows.schema, out)
        with show_progress("predicting") as advance:
            summary = predict_files(
                served, support_rows, query_rows, out, allow_no_support, advance
            )
    without = summary.rows_without_support
    note = f", {without:,} of them without support rows and so not adapted" if without else ""
    print_result(
        out=out, rows=summary.num_rows, rows_without_support=without, seconds=summary.seconds
    )
    make_console(stderr=True).print(
        f"predicted: {out}  ({format_count(summary.num_rows, 'row')}{note}, in "
        f"{summary.seconds:.2f} s)"
    )
