"""JAX: a step is one jitted function with donated arrays, vmap over tasks in groups by length.

Shape suffixes: T tasks, N rows, H longest list or task, V values, U unique ids, R rows of tables, D
embedding width, X all inputs side by side"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from peers.interface import Parameters, Peer
from peers.workload import ADAGRAD_EPS, WIDTH, Batch, Rates, Workload

BETA1, BETA2, ADAM_EPS = 0.9, 0.999, 1e-8  # torch.optim.Adam's
# A padding row is wasted work, a group is one more size to compile and to start. Samples/s on one
# core of an AMD EPYC (Zen 4), jax 0.10.2, MovieLens: 118k with 1 group, 144k with 2, 172k with 4,
# 160k with 8. On a Xeon 4 take at most 2 % more than the best of 1 to 8 there, 4 % on large tables.
GROUPS = 4

Arrays = dict[str, jax.Array]


class Lookup(NamedTuple):
    """Row n reads for field f the weighted ids v with slot_V[v] = n * fields + f (sorted)."""

    id_V: jax.Array  # into the rows read: those of all tables, or unique_U
    slot_V: jax.Array
    weight_V: jax.Array
    unique_U: jax.Array  # into all tables; padded with R, which a scatter drops


class Side(NamedTuple):
    """One side of a group of tasks; padding is row 0 at weight 0, a task's weights sum to 1."""

    row_TH: jax.Array
    label_TH: jax.Array
    weight_TH: jax.Array


class JaxBatch(NamedTuple):
    """A batch of one size for the whole workload, so that the step is compiled once."""

    lookup: Lookup
    support: tuple[Side, ...]
    query: tuple[Side, ...]


class State(NamedTuple):
    """Parameters, Adagrad's sums of squares of the tables, Adam's mean and square of the layers."""

    table_RD: jax.Array
    squares_RD: jax.Array
    theta: Arrays
    mean: Arrays
    square: Arrays
    steps: jax.Array


def head_loss(
    theta: Arrays, rows_HX: jax.Array, label_H: jax.Array, weight_H: jax.Array
) -> jax.Array:
    """Weighted mean squared error of MeLU's decision layers."""
    hidden = jax.nn.relu(rows_HX @ theta["fc1.weight"].T + theta["fc1.bias"])
    hidden = jax.nn.relu(hidden @ theta["fc2.weight"].T + theta["fc2.bias"])
    score_H = (hidden @ theta["linear_out.weight"].T + theta["linear_out.bias"])[:, 0]
    return jnp.sum(weight_H * (score_H - label_H) ** 2)


def pool(rows_UD: jax.Array, lookup: Lookup, num_rows: int, num_fields: int) -> jax.Array:
    """Embeddings of the batch's rows [N, X]."""
    read_VD = rows_UD[lookup.id_V]
    if lookup.id_V.shape[0] != num_rows * num_fields:  # else one id a field: nothing to sum
        weighted_VD = read_VD * lookup.weight_V[:, None]
        read_VD = jax.ops.segment_sum(
            weighted_VD, lookup.slot_V, num_rows * num_fields, indices_are_sorted=True
        )
    return read_VD.reshape(num_rows, num_fields * WIDTH)


@final
class Jax(Peer):
    """All tables are one array; of large ones, only the batch's distinct rows train."""

    def build(self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates) -> None:
        self.fields, self.rates = data.fields, rates
        self.gathers = data.large_tables
        self.first_rows = np.cumsum([0] + [field.num_rows for field in data.fields])
        # One size for all batches: every other one would be compiled anew.
        self.num_rows = round_up(max(batch.num_rows for batch in data.batches), 64)
        self.num_ids = max(
            sum(len(ids.ids_V) for ids in batch.ids.values()) for batch in data.batches
        )
        if any(field.multi for field in data.fields):
            self.num_ids = round_up(self.num_ids, 256)
        else:
            self.num_ids = self.num_rows * len(data.fields)
        self.widths = [group_widths(data, side) for side in (0, 1)]
        table_RD = jnp.asarray(np.concatenate([init[f"emb.{field.name}"] for field in data.fields]))
        theta = {
            name: jnp.asarray(value) for name, value in init.items() if not name.startswith("emb.")
        }
        mean, square = (jax.tree.map(jnp.zeros_like, theta) for _ in range(2))
        self.state = State(table_RD, jnp.zeros_like(table_RD), theta, mean, square, jnp.zeros(()))
        # The old state's memory becomes the new one's: the tables are not copied.
        self.jitted_step = jax.jit(self._step, donate_argnums=0)
        self.jitted_gradients = jax.jit(self._loss_and_gradients)

    def prepare(self, batch: Batch) -> JaxBatch:
        middle_T = batch.row_offsets_T1[:-1] + batch.support_lengths_T
        bounds = ((batch.row_offsets_T1[:-1], middle_T), (middle_T, batch.row_offsets_T1[1:]))
        # By length, so that tasks of a group are padded little.
        groups = np.array_split(np.argsort(batch.support_lengths_T, kind="stable"), GROUPS)
        support, query = (
            tuple(
                pad(batch.label_N, starts_T[group], ends_T[group], width)
                for group, width in zip(groups, widths, strict=True)
            )
            for (starts_T, ends_T), widths in zip(bounds, self.widths, strict=True)
        )
        return jax.device_put(JaxBatch(self._lookup(batch), support, query))

    def step(self, prepared: JaxBatch) -> float:
        self.state, loss = self.jitted_step(self.state, prepared)
        # JAX returns before it has computed: the value makes the clock wait for it.
        return float(loss)

    def gradients(self, prepared: JaxBatch) -> Parameters:
        _, (rows_UD, theta) = self.jitted_gradients(self.state, prepared)
        dense_RD = np.asarray(rows_UD)
        if self.gathers:
            real_U = np.asarray(prepared.lookup.unique_U) < self.first_rows[-1]
            dense_RD = np.zeros(self.state.table_RD.shape, np.float32)
            dense_RD[np.asarray(prepared.lookup.unique_U)[real_U]] = np.asarray(rows_UD)[real_U]
        found = {name: np.asarray(value) for name, value in theta.items()}
        for field, first in zip(self.fields, self.first_rows, strict=False):
            found[f"emb.{field.name}"] = dense_RD[first : first + field.num_rows]
        return found

    def _lookup(self, batch: Batch) -> Lookup:
        ids, slots, weights = [], [], []
        for number, (field, first) in enumerate(zip(self.fields, self.first_rows, strict=False)):
            lengths_N = np.diff(batch.ids[field.name].offsets_N1)
            ids.append(batch.ids[field.name].ids_V + first)
            slots.append(
                np.repeat(np.arange(batch.num_rows) * len(self.fields) + number, lengths_N)
            )
            weights.append(np.repeat(1 / lengths_N, lengths_N))
        order = np.argsort(np.concatenate(slots), kind="stable")
        id_V, slot_V, weight_V = (np.concatenate(parts)[order] for parts in (ids, slots, weights))
        unique_U = np.zeros(0, np.int64)
        if self.gathers:
            distinct, id_V = np.unique(id_V, return_inverse=True)
            unique_U = filled(distinct, self.num_ids, int(self.first_rows[-1]))
        last_slot = self.num_rows * len(self.fields) - 1
        return Lookup(
            filled(id_V, self.num_ids, 0).astype(np.int32),
            filled(slot_V, self.num_ids, last_slot).astype(np.int32),
            filled(weight_V, self.num_ids, 0).astype(np.float32),
            unique_U.astype(np.int32),
        )

    def _query_loss(self, rows_UD: jax.Array, theta: Arrays, batch: JaxBatch) -> jax.Array:
        rows_NX = pool(rows_UD, batch.lookup, self.num_rows, len(self.fields))

        def adapted_loss(support: Side, query: Side) -> jax.Array:
            grads = jax.grad(head_loss)(
                theta, rows_NX[support.row_TH], support.label_TH, support.weight_TH
            )
            theta_t = {
                name: weight - self.rates.inner * grads[name] for name, weight in theta.items()
            }
            return head_loss(theta_t, rows_NX[query.row_TH], query.label_TH, query.weight_TH)

        groups = zip(batch.support, batch.query, strict=True)
        return jnp.concatenate([jax.vmap(adapted_loss)(*sides) for sides in groups]).mean()

    def _loss_and_gradients(
        self, state: State, batch: JaxBatch
    ) -> tuple[jax.Array, tuple[jax.Array, Arrays]]:
        rows_UD = state.table_RD[batch.lookup.unique_U] if self.gathers else state.table_RD
        return jax.value_and_grad(self._query_loss, argnums=(0, 1))(rows_UD, state.theta, batch)

    def _step(self, state: State, batch: JaxBatch) -> tuple[State, jax.Array]:
        loss, (rows_grad_UD, theta_grad) = self._loss_and_gradients(state, batch)
        where = batch.lookup.unique_U if self.gathers else slice(None)
        squares_RD = state.squares_RD.at[where].add(rows_grad_UD**2, mode="drop")
        step_UD = self.rates.tables * rows_grad_UD / (jnp.sqrt(squares_RD[where]) + ADAGRAD_EPS)
        table_RD = state.table_RD.at[where].add(-step_UD, mode="drop")

        steps = state.steps + 1
        mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.mean, theta_grad)
        square = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g**2, state.square, theta_grad)
        adam = partial(adam_step, steps=steps, rate=self.rates.outer)
        theta = jax.tree.map(lambda weight, m, v: weight + adam(m, v), state.theta, mean, square)
        return State(table_RD, squares_RD, theta, mean, square, steps), loss


def adam_step(mean: jax.Array, square: jax.Array, *, steps: jax.Array, rate: float) -> jax.Array:
    """What Adam adds to a weight (arXiv 1412.6980, algorithm 1)."""
    corrected = jnp.sqrt(square / (1 - BETA2**steps)) + ADAM_EPS
    return -rate * mean / (1 - BETA1**steps) / corrected


def group_widths(data: Workload, side: int) -> list[int]:
    """Longest support (side 0) or query (side 1) of each group over all batches."""
    widths = np.zeros(GROUPS, np.int64)
    for batch in data.batches:
        support_T = batch.support_lengths_T
        lengths_T = support_T if side == 0 else np.diff(batch.row_offsets_T1) - support_T
        groups = np.array_split(np.argsort(support_T, kind="stable"), GROUPS)
        widths = np.maximum(widths, [lengths_T[group].max() for group in groups])
    return widths.tolist()


def pad(
    label_N: NDArray[np.float32], starts_T: NDArray[np.int64], ends_T: NDArray[np.int64], width: int
) -> Side:
    """Rows start to end of each task in a rectangle of the given width."""
    lengths_T = ends_T - starts_T
    real_TH = np.arange(width) < lengths_T[:, None]
    row_TH = np.where(real_TH, starts_T[:, None] + np.arange(width), 0)
    return Side(
        row_TH.astype(np.int32), label_N[row_TH], (real_TH / lengths_T[:, None]).astype(np.float32)
    )


def filled(values: NDArray[np.generic], size: int, padding: float) -> NDArray[np.generic]:
    """The values, then the padding up to `size`."""
    return np.pad(values, (0, size - len(values)), constant_values=padding)


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above the value."""
    return -(-value // multiple) * multiple


def make() -> Jax:
    """The peer."""
    return Jax()
