"""The rows of a rank's tables and of their optimizer, as plain torch tensors on any device.

Shape suffixes: R rows of tables, D embedding width"""

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import Tensor, nn

if TYPE_CHECKING:  # what tables lie in is the business of whoever names a storage
    from gmeta.distributed.tables.table_storage import StoredRows, TableStorage


class Cache(Protocol):
    """Rows that are newer than in the tables."""

    def flush(self) -> None:
        """Write them to the tables."""

    def reset(self) -> None:
        """Forget them."""


class StateNames(NamedTuple):
    """The names of torch's optimizer state of a weight, and which of it is one number a row."""

    names: tuple[str, ...]
    of_rows: tuple[str, ...] = ()


# As TorchRec's checkpoints know them from fbgemm.
STATES = {
    EmbOptimType.EXACT_SGD: StateNames(()),
    EmbOptimType.EXACT_ADAGRAD: StateNames(("sum",)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: StateNames(("sum",), of_rows=("sum",)),
    EmbOptimType.ADAM: StateNames(("exp_avg", "exp_avg_sq")),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: StateNames(
        ("exp_avg", "exp_avg_sq"), of_rows=("exp_avg_sq",)
    ),
}

# State of rows beside an optimizer's: how many steps have asked for a row, and the last that did.
STEPS_ASKED, LAST_STEP = "steps_asked", "last_step"


@final
class PlainTables(nn.Module):
    """Tables of one width that are looked up and updated together. Raises KeyError: the optimizer
    is not in STATES. Raises ValueError: the tables have several widths."""

    # In place of fbgemm's SplitTableBatchedEmbeddingBagsCodegen, with its arguments, and the calls
    # that TorchRec makes on it but for the lookup: sharding, state dicts and checkpoints are
    # TorchRec's own, without a kernel of fbgemm, and every optimizer runs on a CPU.
    def __init__(
        self,
        embedding_specs: list[tuple[int, int, Any, Any]],
        optimizer: EmbOptimType,
        device: torch.device,
        weights_precision: SparseType = SparseType.FP32,
        learning_rate: float = 0.01,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
        storage: "TableStorage | None" = None,
        admission: tuple[int, int] = (0, 0),
        **_: Any,
    ) -> None:
        super().__init__()
        self.embedding_specs = embedding_specs  # rows, columns, place and device of each table
        rows = [spec[0] for spec in embedding_specs]
        widths = {spec[1] for spec in embedding_specs}
        if len(widths) != 1:
            raise ValueError(f"tables of one group have widths {sorted(widths)}: they need one")
        (self.width,) = widths
        self.first_row_of_table = list(accumulate(rows, initial=0))[:-1]
        self.optimizer = optimizer
        self.learning_rate, self.epsilon, self.betas = learning_rate, eps, (beta1, beta2)
        self.weight_decay = 0.0  # decoupled
        self.admission = admission  # model.admission
        own = (STEPS_ASKED,) * (admission[0] > 0) + (LAST_STEP,) * (admission[1] > 0)
        known = STATES[optimizer]
        self.states = StateNames(known.names + own, known.of_rows + own)
        self.steps_done = 0  # Adam's bias correction depends on it
        self.weights_precision = weights_precision
        dtype, num_rows = weights_precision.as_dtype(), sum(rows)
        self.device, self.storage = device, storage
        self.cache: Cache | None = None
        shapes = {
            name: (num_rows, 1 if name in self.states.of_rows else self.width)
            for name in self.states.names
        }
        # What holds rows that the device does not; by state, and "" the rows themselves.
        self.stored: dict[str, StoredRows] = {}
        if storage is None:
            # TorchRec fills `split_embedding_weights`: zeros would cost one more pass.
            self.values_RD = torch.empty(num_rows, self.width, dtype=dtype, device=device)
            self.state = {
                name: torch.zeros(*shape, dtype=dtype, device=device)
                for name, shape in shapes.items()
            }
        else:
            shapes = {"": (num_rows, self.width), **shapes}
            self.stored = {name: storage.allocate(shape, dtype) for name, shape in shapes.items()}
            self.state = {name: stored.values_RD for name, stored in self.stored.items()}
            self.values_RD = self.state.pop("")
        # The same memory, as TorchRec's parameter of each table wants it.
        self.weights_host = self.weights_dev = nn.Parameter(self.values_RD.view(-1))

    @property
    def weights_physical_offsets(self) -> list[int]:
        """Return where each table begins in the flat weights."""
        return [first_row * self.width for first_row in self.first_row_of_table]

    def split_embedding_weights(self) -> list[Tensor]:
        """Return views of the tables: [rows, columns] each."""
        return self._split_tables(self.values_RD)

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Return views of each table's state by name: [rows, columns] or [rows]; none for SGD."""
        if not self.state:
            return []
        of_rows = self.states.of_rows
        by_table = zip(*map(self._split_tables, self.state.values()), strict=True)
        return [
            {
                # As fbgemm gives them, which TorchRec's checkpoints know.
                name: part.squeeze(1) if name in of_rows else part
                for name, part in zip(self.state, parts, strict=True)
            }
            for parts in by_table
        ]

    def get_learning_rate(self) -> float:
        """Return the rate of the next update."""
        return self.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next update."""
        self.learning_rate = rate

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps before the next update."""
        self.steps_done = step

    def flush(self) -> None:
        """Write the rows that a cache, if any, holds back."""
        if self.cache is not None:
            self.cache.flush()

    def reset_cache_states(self) -> None:
        """Have a cache, if any, forget all rows."""
        if self.cache is not None:
            self.cache.reset()

    def _split_tables(self, values_RD: Tensor) -> list[Tensor]:
        return list(values_RD.split([spec[0] for spec in self.embedding_specs]))
