"""`gmeta predict` once its options are known to be right."""

from pathlib import Path

from gmeta.commands.screen import first_progress, print_result, screen
from gmeta.errors import UserError
from gmeta.files.local import check_replaces
from gmeta.serving.bulk.files import RowFiles, check_fits
from gmeta.serving.bulk.predict import predict_files, schema_of
from gmeta.serving.load import load
from gmeta.serving.outputs import outputs_of
from metaio.counted import counted


def predict_rows(
    model: Path, support: str, query: str, out: Path, allow_no_support: bool, verify: bool
) -> None:
    """Predict the rows of `query`, write them to `out` and print how many there were."""
    served = load(model, verify)
    support_rows, query_rows = RowFiles(support), RowFiles(query)
    sides = (("SUPPORT", support_rows.names), ("QUERY", query_rows.names))
    check_replaces(out, [(what, name) for what, names in sides for name in names], True)
    for name in schema_of(outputs_of(served.config)).names:
        if name in query_rows.schema.names:
            raise UserError(
                f"{query} has a column {name} already: the output would have two of them. "
                "Rename or drop it"
            )
    check_fits(query_rows.schema, out)
    with first_progress("predicting") as advance:
        found = predict_files(served, support_rows, query_rows, out, allow_no_support, advance)
    without = found.rows_without_support
    told = f", {without:,} of them without support rows and so not adapted" if without else ""
    print_result(
        {
            "out": out,
            "rows": found.num_rows,
            "rows_without_support": without,
            "seconds": found.seconds,
        }
    )
    screen(stderr=True).print(
        f"predicted: {out}  ({counted(found.num_rows, 'row')}{told}, in {found.seconds:.2f} s)",
    )
