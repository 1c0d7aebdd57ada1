"""Meta-Embedding's generator: the embedding of an id that training never saw, from its content.

Pan et al., "Warm Up Cold-start Advertisements: Improving CTR Predictions via Learning to Learn ID
Embeddings", SIGIR 2019 (arXiv 1904.11547), section 3.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, D embedding width"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from gmeta_models.inputs import RowInputs
    from gmeta_models.model_config import InputSizes, Pooling

# The largest value in a new generator's embeddings.
START_SCALE = 0.2


@dataclass(frozen=True)
class ContentColumns:
    """The columns that describe an id, and the id's single-id column."""

    id_column: int
    single: tuple[int, ...]
    multi: tuple[int, ...]
    pooling: Pooling


def content_columns(
    table: str, content: Sequence[str], sizes: InputSizes, pooling: Pooling
) -> ContentColumns:
    """Return the places of the id's column, the only one that reads `table`, and of its content."""
    single = [column.name for column in sizes.single]
    multi = [column.name for column in sizes.multi]
    readers = [c.name for c in (*sizes.single, *sizes.multi) if c.table == table]
    # Another reader would see the table's rows, which hold moves and no embeddings.
    if len(readers) != 1 or readers[0] in multi:
        raise ValueError(
            f'algorithm.name = "metaemb" generates the embeddings of table {table!r}, which '
            f"{', '.join(readers) or 'no column'} reads: exactly 1 single-id column may. Name the "
            "table of such a column in algorithm.adapt_embeddings, or give it a table of its own "
            "in the schema and prepare again"
        )
    known = [name for name in (*single, *multi) if name != readers[0]]
    for name in content:
        if name not in known:
            raise ValueError(
                f"algorithm.options.content names {name!r}: the columns that may describe "
                f"{readers[0]!r} are {', '.join(known) or 'none'}. Name some of them"
            )
    if not content:
        raise ValueError(
            'algorithm.options.content = [] with algorithm.name = "metaemb": an embedding is '
            f"generated from columns that describe {readers[0]!r}. Name some of {', '.join(known)}"
        )
    return ContentColumns(
        single.index(readers[0]),
        tuple(index for index, name in enumerate(single) if name in content),
        tuple(index for index, name in enumerate(multi) if name in content),
        pooling,
    )


class IdGenerator(nn.Module):
    """phi = s tanh(W u): u are the content's embeddings side by side, from the model's tables. As
    in the paper the last layer has no bias, and tanh bounds its outputs."""

    def __init__(self, columns: ContentColumns, width: int) -> None:
        super().__init__()
        self.columns = columns
        inputs = (len(columns.single) + len(columns.multi)) * width
        self.generate = nn.Linear(inputs, width, bias=False)
        # A constant in the paper; learned here, as tables may have any scale.
        self.scale = nn.Parameter(torch.tensor(START_SCALE))

    def forward(self, inputs: RowInputs) -> RowInputs:
        """Return the rows with the generated embedding added to that of the id column."""
        columns = self.columns
        single_NFD = inputs.single_NFD
        # Column by column: with a list as an index CUDA makes the host wait.
        content = [single_NFD[:, column] for column in columns.single]
        if columns.multi:
            pooled_NMD = inputs.pooled_NMD(columns.pooling)
            content += [pooled_NMD[:, column] for column in columns.multi]
        made_ND = self.scale * torch.tanh(self.generate(torch.cat(content, dim=1)))
        # The rows of its table hold their moves in inner steps: 0 before the first.
        parts = [columns.id_column, 1, single_NFD.shape[1] - columns.id_column - 1]
        before, id_N1D, behind = single_NFD.split(parts, dim=1)
        id_N1D = id_N1D + made_ND.to(id_N1D.dtype).unsqueeze(1)
        return replace(inputs, single_NFD=torch.cat([before, id_N1D, behind], dim=1))
