"""`gmeta predict` once its options are known to be right."""

import time
from pathlib import Path

from gmeta.commands.screen import screen
from gmeta.errors import UserError
from gmeta.serving.files import read_rows, write_rows
from gmeta.serving.load import load
from metaio.counted import counted

OUTPUT_COLUMNS = ("prediction", "prediction_before", "support_rows")


def predict_rows(
    model: Path, support: str, query: str, out: Path, allow_no_support: bool, verify: bool
) -> None:
    """Predict the rows of `query`, write them to `out` and print how many there were."""
    served = load(model, verify)
    support_rows, query_rows = read_rows(support), read_rows(query)
    for name in OUTPUT_COLUMNS:
        if name in query_rows.column_names:
            raise UserError(
                f"{query} has a column {name} already: the output would have two of them. "
                "Rename or drop it"
            )
    # Without reading and writing: what is told is the model's own time.
    begin_s = time.perf_counter()
    found = served.predict_tasks(support_rows, query_rows, allow_no_support)
    spent_s = time.perf_counter() - begin_s
    values = (found.after_N, found.before_N, found.support_rows_N)
    for name, column in zip(OUTPUT_COLUMNS, values, strict=True):
        query_rows = query_rows.append_column(name, [column.numpy()])
    write_rows(query_rows, out)
    without = int((found.support_rows_N == 0).sum())
    told = f", {without:,} of them without support rows and so not adapted" if without else ""
    screen(stderr=True).print(
        f"predicted: {out}  ({counted(query_rows.num_rows, 'row')}{told}, in {spent_s:.2f} s)",
    )
