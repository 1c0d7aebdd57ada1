"""`gmeta export --format`: a run, or a model that was exported before, for another runtime."""

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gmeta.errors import GMetaError, UserError
from gmeta.serving.export import export_run
from gmeta.serving.exported_folder import (
    CONFIG_FILE,
    FolderKind,
    is_export,
    new_folder,
    read_config,
)
from gmeta.serving.formats.program_inputs import is_program, write_inputs
from gmeta.serving.formats.torch_onnx_export import (
    ADAPTED_FILE,
    FORWARD_FILE,
    ONNX_FILE,
    adapted_shapes,
    check_onnx,
    export_adapted,
    export_forward,
    forward_shapes,
    write_onnx,
)
from gmeta.serving.formats.triton_repository import MODEL_FOLDER, is_repository, write_repository
from gmeta.serving.model_loader import load
from gmeta.serving.served_model import ServedModel
from gmeta.serving.table_format import TableFormat
from metaio.format.atomic_folder import copy_folder

Runtime = Literal["torch", "onnx", "triton"]
_PROGRAM = FolderKind("exported program", is_program)
_REPOSITORY = FolderKind("exported Triton model", is_repository)


@dataclass(frozen=True)
class RuntimeExport:
    """What was written: the bytes of all files, and a line for what could not be."""

    num_bytes: int
    left_out: str = ""


def export_for(
    source: Path,
    out: Path,
    runtime: Runtime,
    table_format: TableFormat | None = None,
    step: int | None = None,
    overwrite: bool = False,
) -> RuntimeExport:
    """Write a run's checkpoint, or an exported model, for another runtime to the folder `out`."""
    was_exported = is_export(source)
    if was_exported and (table_format, step) != (None, None):
        raise UserError(
            f"{source} is an exported model, whose step and tables are chosen: --step and --tables "
            "are for runs. Leave them out, or name the run"
        )
    if runtime == "onnx":
        check_onnx()
    is_triton = runtime == "triton"
    with new_folder(out, overwrite, _REPOSITORY if is_triton else _PROGRAM) as partial:
        # Beside a program the model is removed again: nothing of it is needed to run one.
        model = partial / MODEL_FOLDER if is_triton else partial / ".model"
        if not was_exported:
            export_run(source, model, table_format or "float32", step)
        elif is_triton:
            _copy(source, model)
        else:
            model = source
        # What this process has just exported need not be read twice.
        served = load(model, verify=was_exported)
        left_out = ""
        if is_triton:
            write_repository(partial, out.absolute().name, served.config)
        else:
            left_out = _write_program(served, model, partial, runtime)
            if not was_exported:
                shutil.rmtree(model)
        num_bytes = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    return RuntimeExport(num_bytes, left_out)


def _write_program(served: ServedModel, model: Path, folder: Path, runtime: Runtime) -> str:
    left_out, programs = "", {}
    if runtime == "onnx":
        write_onnx(served, folder / ONNX_FILE)
        programs[ONNX_FILE] = forward_shapes(served)
    else:
        _save(export_forward(served), folder / FORWARD_FILE)
        programs[FORWARD_FILE] = forward_shapes(served)
        try:
            _save(export_adapted(served), folder / ADAPTED_FILE)
            programs[ADAPTED_FILE] = adapted_shapes(served)
        except GMetaError as error:  # said, not silent: the other program is whole
            left_out = f"without {ADAPTED_FILE}: {error}"
    write_inputs(folder, served.config, programs)
    # inputs.json refers to them: readers in other languages encode raw columns themselves.
    listed = [name for name in served.config.files if name.startswith("vocabulary/")]
    copy_folder(model, folder, names=listed)
    return left_out


def _save(program: torch.export.ExportedProgram, path: Path) -> None:
    # Not by torch's own writer of files, which aborts the process on a full disk.
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getvalue())


def _copy(model: Path, folder: Path) -> None:
    # Only what the config lists: other files in the folder are not the model's.
    copy_folder(model, folder, shutil.copyfile, (CONFIG_FILE, *read_config(model).files))
