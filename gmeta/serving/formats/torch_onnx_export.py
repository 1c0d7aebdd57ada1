"""Programs of torch.export and ONNX: made from an exported model, and compared with it.

Shape suffix: N rows"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from gmeta.errors import GMetaError, UserError
from gmeta.serving.formats.program_examples import (
    Example,
    Shapes,
    adapting_sizes,
    draw_alone,
    draw_both_sides,
    name_shapes,
)
from gmeta.serving.formats.program_modules import (
    OUTPUT,
    AdaptAndPredict,
    UnadaptedForward,
    record_graph,
)
from gmeta.serving.served_model import ServedModel

FORWARD_FILE, ADAPTED_FILE, ONNX_FILE = "predict.pt2", "adapt_predict.pt2", "predict.onnx"
# Twice what float32 leaves between two orders of summation in models of this size.
TOLERANCE = 1e-5
_OPSET = 18
# Rows and longest list of examples.
_ALONE, _FEWEST = (6, 2), (1, 1)


def export_forward(served: ServedModel) -> ExportedProgram:
    """Return the predictions without adaptation as a program of one dict of inputs. Raises
    GMetaError: torch cannot export the model, or what it made predicts something else."""
    what = "predictions without adaptation"
    with _translate_errors(what):
        program = _export_program(UnadaptedForward(served).eval(), draw_alone(served, *_ALONE)[0])
    compute = program.module()
    # The second was not recorded: a size that became a constant of the program shows there.
    for num_rows, longest in (_ALONE, _FEWEST):
        example, expected = draw_alone(served, num_rows, longest, support_rows=num_rows + longest)
        _check(compute(example), expected, what)
    return program


def export_adapted(served: ServedModel) -> ExportedProgram:
    """Return adaptation to one task and the predictions of its query rows as a program. Raises
    UserError for a model with statistics of support rows, and as export_forward does."""
    if served.learner.statistics.width:
        raise UserError(
            "adaptation cannot become a program of torch: support_features are counted from the "
            "rows outside the model. Train without them, or adapt by gmeta.load or gmeta serve"
        )
    what = "predictions after adaptation"
    checks = []
    # Before recording: a constant that the model keeps must not be first made as one recorded.
    for support, query in (adapting_sizes(served.config.features), (_FEWEST, _FEWEST)):
        example, support_rows, query_rows = draw_both_sides(served, support, query)
        task = served.adapt_encoded(support_rows, [support_rows.num_rows])
        expected = served.predict_encoded(task, query_rows, [query_rows.num_rows])
        checks.append((example, expected))
    example, _ = checks[0]
    with _translate_errors(what):
        program = _export_program(record_graph(AdaptAndPredict(served).eval(), example), example)
    compute = program.module()
    for example, expected in checks:
        _check(compute(example), expected, what)
    return program


def write_onnx(served: ServedModel, path: Path) -> ExportedProgram:
    """Write the predictions without adaptation as an ONNX model, with the tables inside; return
    the program of torch that it was made of."""
    program = export_forward(served)
    example, _ = draw_alone(served, *_ALONE)
    with _translate_errors("an ONNX model"):
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=_OPSET,
            input_names=list(example),
            output_names=[OUTPUT],
            dynamic_shapes=(_dynamic_dims(example),),  # the names of the dimensions
            verbose=False,
            optimize=True,
        )
        assert made is not None  # it is for dynamo=True
        for node in made.model.graph:
            node.metadata_props.clear()  # where in which file of this machine each comes from
        # From 2 GiB on, the most that such a file holds, weights go to `PATH.data` beside it.
        made.save(path)
    return program


def check_onnx() -> None:
    """Raise UserError where the packages of the extra are missing."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format onnx needs the extra, as {missing[0]} is not installed: "
            "pip install 'gmeta[onnx]'"
        )


def forward_shapes(served: ServedModel) -> Shapes:
    """Return the shape of each input of the predictions without adaptation."""
    return name_shapes(draw_alone(served, *_ALONE)[0])


def adapted_shapes(served: ServedModel) -> Shapes:
    """Return the shapes of the inputs of adaptation and predictions."""
    return name_shapes(draw_both_sides(served, *adapting_sizes(served.config.features))[0])


def _dynamic_dims(example: Example) -> dict[str, dict[int, str]]:
    """Return the place and the name of each input's dimensions that may be of any size."""
    return {
        name: {place: dim for place, dim in enumerate(shape) if isinstance(dim, str)}
        for name, shape in name_shapes(example).items()
    }


def _export_program(module: nn.Module, example: Example) -> ExportedProgram:
    dims = {
        name: {place: Dim(dim, min=1) for place, dim in dims_by_place.items()}
        for name, dims_by_place in _dynamic_dims(example).items()
    }
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=(dims,))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # files of this machine, and most of a program's bytes
    return program


@contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    """Raise what torch cannot export as one line, without torch's own warnings."""
    try:
        with warnings.catch_warnings(), _silence_loggers():
            warnings.simplefilter("ignore")
            yield
    # One line already, or the disk's own trouble.
    except (UserError, GMetaError, OSError):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as raised:
        error: BaseException = raised
        while error.__cause__ is not None:  # torch.onnx says what it does, and why as the cause
            error = error.__cause__
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise GMetaError(
            f"{what} cannot be exported from this model: {type(error).__name__}: {reason:.200}. "
            "Serve it by gmeta serve or --format triton, which run the model itself"
        ) from raised


@contextmanager
def _silence_loggers() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check(found_N: Tensor, expected_N: Tensor, what: str) -> None:
    difference = float((found_N - expected_N).abs().max())
    scale = max(1.0, float(expected_N.abs().max()))
    # "Not at most", as NaN must fail too.
    if not difference <= TOLERANCE * scale:
        raise GMetaError(
            f"the program's {what} differ from the model's by {difference:g}; at most "
            f"{TOLERANCE:g} is allowed. The model reads its lists other than by pooled_NMD and "
            "bags_NHD, or does not treat each row on its own: serve it by gmeta serve"
        )
