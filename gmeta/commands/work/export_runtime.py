"""`gmeta export --format torch`, `onnx` and `triton` once their options are known to be right."""

from pathlib import Path

from gmeta.commands.screen import screen, size_text
from gmeta.runtimes.write import Runtime, export_for
from gmeta.serving.folder import TableFormat

_USES = {
    "torch": 'torch.export.load("{out}/predict.pt2").module()(inputs), by {out}/inputs.json',
    "onnx": 'onnxruntime.InferenceSession("{out}/predict.onnx"), by {out}/inputs.json',
    "triton": "tritonserver --model-repository {parent}, with gmeta in the Python of its backend",
}


def export_for_runtime(
    source: Path,
    out: Path,
    runtime: Runtime,
    tables: TableFormat | None,
    step: int | None,
    overwrite: bool,
) -> None:
    """Export for another runtime, and print how large it became, what is not in it and how to use
    it."""
    written = export_for(source, out, runtime, tables, step, overwrite)
    lines = [f"exported: {out}  ({runtime}, {size_text(written.num_bytes)})"]
    lines += [written.left_out] if written.left_out else []
    lines += ["use it: " + _USES[runtime].format(out=out, parent=out.absolute().parent)]
    screen(stderr=True).print("\n".join(lines))
