"""`gmeta export --format triton` copies this file to NAME/1/model.py: Triton's Python backend needs
gmeta. A request is of one task: columns are query rows, with `support.` in front support rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import triton_python_backend_utils as pb_utils

from gmeta.errors import GMetaError
from gmeta.serving.model_loader import load
from gmeta.serving.outputs import BEFORE, PREDICTION
from gmeta.serving.server.input_columns import describe_columns
from gmeta.serving.server.request_errors import RequestError, bad_request
from gmeta.serving.server.request_rows import to_rows
from gmeta.serving.server.server_limits import RequestLimits
from gmeta.serving.server.tensors import Tensor
from metaio.errors import MetaIOError


class TritonPythonModel:
    """Answers requests with `gmeta.load` of the folder beside this file."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; Triton calls this once an instance."""
        self.model = load(Path(__file__).parent / "model")
        self.columns = describe_columns(self.model.config)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request, in order; one that is wrong gets its own error."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            found = self._predict([_tensor(each) for each in request.inputs()])
        except (GMetaError, MetaIOError, RequestError) as error:
            failure = pb_utils.TritonError(str(error))
            return pb_utils.InferenceResponse(output_tensors=[], error=failure)
        names = request.requested_output_names()
        outputs = [pb_utils.Tensor(name, found[name]) for name in found if name in names]
        return pb_utils.InferenceResponse(output_tensors=outputs)

    def _predict(self, inputs: list[Tensor]) -> dict[str, Any]:
        # Triton has limits of its own.
        limits = RequestLimits(rows=1 << 31)
        support, query, events = to_rows(self.columns, inputs, limits, shares_lists=False)
        if query is None:
            raise bad_request(
                "the request has no rows to predict. Send inputs named like the columns"
            )
        before_N = self.model.predict(query.table).numpy()
        # Without support rows both outputs are the same.
        after_N = before_N
        if support is not None or events is not None:
            known = (None if side is None else side.table for side in (support, events))
            after_N = self.model.adapt(*known).predict(query.table).numpy()
        found = {PREDICTION: after_N, BEFORE: before_N}
        return {one.name: one.values_N(found[one.kind]) for one in self.columns.outputs}


def _tensor(given: Any) -> Tensor:
    values = given.as_numpy()
    # Triton's BYTES are an array of Python's bytes objects.
    flat = pa.array(values.ravel().tolist(), pa.binary()) if values.dtype == np.object_ else None
    try:
        array = pa.array(values.ravel()) if flat is None else flat.cast(pa.string())
    except pa.ArrowException as error:
        raise bad_request(
            f"input {given.name()} has an element of BYTES that is no UTF-8"
        ) from error
    return Tensor(given.name(), values.shape, array)
