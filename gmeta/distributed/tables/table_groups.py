"""Finds groups of tables that share a kernel, wherever TorchRec has put them in a module."""

from collections.abc import Iterator
from typing import TypeAlias

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.platform.internals import table_kernels

Group: TypeAlias = PlainTables | SplitTableBatchedEmbeddingBagsCodegen


def table_groups(module: nn.Module) -> Iterator[Group]:
    """Yield this rank's groups of tables that share one lookup kernel."""
    return (kernel.group for kernel in table_kernels(module))
