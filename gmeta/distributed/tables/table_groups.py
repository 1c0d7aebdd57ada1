"""The groups of tables that are kept together, wherever TorchRec has put them in a module."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.platform.internals import table_kernels

Group: TypeAlias = PlainTables | SplitTableBatchedEmbeddingBagsCodegen


def adam_groups(sharded: nn.Module) -> list[Group]:
    """Return this rank's groups of tables with Adam."""
    adams = EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM
    return [group for group in table_groups(sharded) if group.optimizer in adams]


def set_adam_step(groups: Iterable[Group], step: int) -> None:
    """Tell tables with Adam that `step` steps were done: its bias correction depends on it.

    By themselves fbgemm's count lookups, also those of a validation, and start at 0 after a resume.
    """
    for group in groups:
        if isinstance(group, PlainTables):
            group.set_optimizer_step(step)
        else:
            group.iter.fill_(step)
            group.iter_cpu.fill_(step)


def table_groups(module: nn.Module) -> Iterator[Group]:
    """Yield this rank's groups of tables that share one lookup kernel, wherever in a module."""
    return (kernel.group for kernel in table_kernels(module))
