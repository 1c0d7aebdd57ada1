"""The work of `gmeta adapt`."""

import time
from pathlib import Path

from gmeta.cli.commands.console import make_console, print_result, show_progress, size_text
from gmeta.serving.offline.adapt_job import adapt_files, renew_files
from metaio.quantities import format_count


def adapt_and_report(
    model: Path,
    support: list[str],
    from_states: str,
    out: Path,
    processes: int,
    verify: bool,
    with_support: bool,
) -> None:
    """Write the states of all tasks of `support`, or of `from_states`, to `out`, with a progress
    bar, and print how many there are."""
    begin_s = time.perf_counter()
    with show_progress("rows") as advance:
        if from_states:
            written = renew_files(model, from_states, out, processes, verify, advance)
        else:
            written = adapt_files(
                model, support, out, processes, verify, advance, with_support=with_support
            )
    spent_s = time.perf_counter() - begin_s
    num_bytes = out.stat().st_size
    print_result(
        out=out, tasks=written.num_tasks, rows=written.num_rows, bytes=num_bytes, seconds=spent_s
    )
    make_console(stderr=True).print(
        f"adapted: {out}  ({format_count(written.num_tasks, 'task')} of "
        f"{format_count(written.num_rows, 'row')}, {size_text(num_bytes)}, in {spent_s:.2f} s)"
    )
