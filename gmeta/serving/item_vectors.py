"""The vectors of all items beside an exported model, for an index that finds the nearest ones.

Shape suffixes: R rows of tables, A items, M multi-id features, D embedding width"""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gmeta.data.item_catalogue import ItemCatalogue
from gmeta.learner import MetaLearner
from gmeta_models.dot import Dot
from metaio.format.dataset import Dataset
from metaio.prepare.episodes.raw_ids import read_raw_items

ITEM_VECTORS_FILE = "item_vectors.parquet"


def write_item_vectors(
    folder: Path, dataset: Dataset, learner: MetaLearner, table: Callable[[str], Tensor]
) -> None:
    """Write item and vector of all items into `folder`, if the model scores by such; `table` gets
    the rows of one. The learner has the trained layers."""
    columns = learner.event_columns
    if columns is None or not isinstance(learner.model, Dot):
        return
    ids_AM = ItemCatalogue.of(dataset, columns).ids_AM
    vectors_AD = torch.zeros(len(ids_AM), learner.tables.width)
    for place, feature in enumerate(columns.target):
        at = int(dataset.features.table_of_single[feature])
        rows_RD = table(dataset.features.tables[at].name).float()
        own = rows_RD[torch.from_numpy(ids_AM[:, place])]
        with torch.no_grad():
            vectors_AD += learner.projections.of_table(at, own)
    item_A = read_raw_items(dataset, ids_AM[:, 0])
    flat = pa.array(vectors_AD.numpy().ravel())
    vectors = pa.FixedSizeListArray.from_arrays(flat, learner.tables.width)
    # Without raw values an item is the row of its table.
    names = pa.array(ids_AM[:, 0]) if item_A is None else item_A
    pq.write_table(pa.table({"item": names, "vector": vectors}), folder / ITEM_VECTORS_FILE)
