"""The work of `gmeta export`."""

from pathlib import Path

from gmeta.cli.commands.console import make_console, print_result, size_text
from gmeta.cli.commands.work.next_version import describe_version, export_since
from gmeta.runs.checkpoints.selected_checkpoint import best_not_kept
from gmeta.runs.chosen_adaptation import CHOSEN_ADAPTATION_FILE
from gmeta.runs.run_folder import RunFolder
from gmeta.serving.export import export_run
from gmeta.serving.formats.export_runtime import Runtime, export_for
from gmeta.serving.model_loader import load
from gmeta.serving.table_format import TableFormat

_USES = {
    "torch": 'torch.export.load("{out}/predict.pt2").module()(inputs), by {out}/inputs.json',
    "onnx": 'onnxruntime.InferenceSession("{out}/predict.onnx"), by {out}/inputs.json',
    "triton": "tritonserver --model-repository {parent}, with gmeta in the Python of its backend",
}


def export_full(
    run: Path, out: Path, tables: TableFormat, step: int | None, overwrite: bool
) -> None:
    """Export the run's checkpoint, and print its size and how to use it."""
    written = export_run(run, out, tables, step, overwrite, load)
    # A model without tables has 0 bytes of them.
    share = written.table_bytes / max(written.float32_table_bytes, 1)
    console = make_console(stderr=True)
    if step is None and (line := best_not_kept(RunFolder(run))):
        console.print(line)
    history = RunFolder(run).read_metrics()
    scores = [line["valid"] for line in history if line["step"] == written.step and "valid" in line]
    if scores and set(scores[-1].values()) == {None}:
        console.print(
            f"run {run}: its validation at step {written.step} has a value of no metric, as where "
            "predictions are not finite. Look at gmeta evaluate, or export another --step"
        )
    if written.adaptation is not None:
        console.print(
            f"adapts with inner_lr = {written.adaptation.inner_lr:g} and inner_steps = "
            f"{written.adaptation.inner_steps}, which gmeta evaluate chose on validation "
            f"({run / CHOSEN_ADAPTATION_FILE})"
        )
    print_result(
        model=out,
        step=written.step,
        bytes=written.num_bytes,
        table_bytes=written.table_bytes,
        tables=tables,
    )
    console.print(
        f"exported: {out}  (step {written.step}, {size_text(written.num_bytes)}; tables "
        f"{tables}, {size_text(written.table_bytes)}, {share:.2f} of what was trained)\n"
        f'use it: gmeta.load("{out}"), or gmeta predict {out} SUPPORT.parquet QUERY.parquet'
    )


def export_for_runtime(
    source: Path,
    out: Path,
    runtime: Runtime,
    tables: TableFormat | None,
    step: int | None,
    overwrite: bool,
) -> None:
    """Export for another runtime, and print its size, what is not in it and how to use it."""
    written = export_for(source, out, runtime, tables, step, overwrite)
    lines = [f"exported: {out}  ({runtime}, {size_text(written.num_bytes)})"]
    lines += [written.left_out] if written.left_out else []
    lines += ["use it: " + _USES[runtime].format(out=out, parent=out.absolute().parent)]
    make_console(stderr=True).print("\n".join(lines))


def export_changes(
    run: Path, out: Path, since: Path, tables: TableFormat, step: int | None, overwrite: bool
) -> None:
    """Export what changed since the version that a channel serves, and print its size."""
    version, why = export_since(run, out, since, tables, step, overwrite)
    print_result(model=out, kind=version.kind, bytes=version.num_bytes, whole=why)
    make_console(stderr=True).print(
        f"exported: {out}  ({describe_version(version)}{f'; whole, since {why}' if why else ''})\n"
        f"serve it: gmeta channel promote {out} {since}"
    )
