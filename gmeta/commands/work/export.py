"""`gmeta export` once its options are known to be right."""

from pathlib import Path

from gmeta.checkpoints.loader import best_not_kept
from gmeta.commands.screen import print_result, screen, size_text
from gmeta.export import export_run
from gmeta.runs.adapting import ADAPTING_FILE
from gmeta.runs.folder import RunFolder
from gmeta.serving.folder import TableFormat


def export_model(
    run: Path, out: Path, tables: TableFormat, step: int | None, overwrite: bool
) -> None:
    """Export the run's checkpoint, and print how large it became and how to use it."""
    written = export_run(run, out, tables, step, overwrite)
    share = written.table_bytes / max(written.float32_table_bytes, 1)
    console = screen(stderr=True)
    if step is None and (line := best_not_kept(RunFolder(run))):
        console.print(line)
    if written.chosen is not None:
        console.print(
            f"adapts with inner_lr = {written.chosen.inner_lr:g} and inner_steps = "
            f"{written.chosen.inner_steps}, which gmeta evaluate chose on validation "
            f"({run / ADAPTING_FILE})"
        )
    print_result(
        {
            "model": out,
            "step": written.step,
            "bytes": written.num_bytes,
            "table_bytes": written.table_bytes,
            "tables": tables,
        }
    )
    console.print(
        f"exported: {out}  (step {written.step}, {size_text(written.num_bytes)}; tables "
        f"{tables}, {size_text(written.table_bytes)}, {share:.2f} of what was trained)\n"
        f'use it: gmeta.load("{out}"), or gmeta predict {out} SUPPORT.parquet QUERY.parquet',
    )
