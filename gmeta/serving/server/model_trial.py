"""A trial of a model before it serves: it adapts to rows of every table and predicts them, within
the time that a request has.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values"""

import time
from dataclasses import replace

import numpy as np

from gmeta.errors import GMetaError
from gmeta.serving.encoded_rows import EncodedColumns, empty_rows
from gmeta.serving.served_model import ServedModel
from gmeta_keys.translate_errors import format_foreign_error, translate_errors
from metaio.format.features import Features

LEAST_S = 10.0  # for what torch does once, on a busy machine too
_NUM_ROWS = 64  # spread over each table: a table is not read as a whole


def try_model(model: ServedModel, limit_s: float) -> None:
    """Raise GMetaError for a model that does not answer, within `limit_s`, by finite values."""
    limit_s = max(limit_s, LEAST_S)
    until_s = time.monotonic() + limit_s

    def check_time(*_: object) -> None:
        if time.monotonic() > until_s:
            raise GMetaError(
                f"the model has not answered a request of {_NUM_ROWS} rows within {limit_s:g} s, "
                f"with inner_steps = {model.config.algorithm.inner_steps}. Train with fewer, or "
                "start the server with a higher --timeout"
            )

    rows = _make_rows(model.config.features)
    # Each inner step runs the network: any number of them is stopped in time.
    hook = model.learner.model.register_forward_pre_hook(check_time)
    try:
        with translate_errors(failure_error, GMetaError):
            before_N = model.predict_encoded([model.unadapted], rows, [_NUM_ROWS])
            # Labels of the scale that the model knows, each of another row.
            support = replace(rows, label_N=before_N.roll(1, 0).numpy())
            states = model.adapt_encoded(support, [_NUM_ROWS])
            model.predict_encoded(states, rows, [_NUM_ROWS])
    finally:
        hook.remove()
    check_time()


def failure_error(error: Exception) -> GMetaError:
    """Return the error of a model that fails in a way that nobody has foreseen."""
    return GMetaError(f"the model fails ({format_foreign_error(error)}). Export the run again")


def _make_rows(features: Features) -> EncodedColumns:
    last = {table.name: table.num_rows - 1 for table in features.tables}
    ids_NF, ids_NM = (
        np.array([np.linspace(0, last[one.table], _NUM_ROWS) for one in chosen], np.int64)
        .reshape(len(chosen), _NUM_ROWS)
        .T
        for chosen in (features.single, features.multi)
    )
    rows = empty_rows(features, _NUM_ROWS)
    return replace(
        rows,
        ids_NF=ids_NF,
        lengths_NM=np.ones_like(rows.lengths_NM),
        values_V=ids_NM.ravel(),
        weight_NW=np.ones_like(rows.weight_NW),
    )
