"""The readers that metaio_reader.py is compared with: the same rows, as a user of each library
would write it.

All but Mosaic read a row table (row_table); Mosaic reads whole pre-built batches, one a sample, as
it is told to."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch
from _metaio_logs import FLOATS, IDS, LISTS

import metaio

BATCH_ROWS = 65_536

Batch = tuple[torch.Tensor, ...]


def row_table(logs: Path, out: Path) -> None:
    """The logs sorted by user and time, a row group of 65,536 rows, for the peers."""
    schema = pq.read_schema(logs)
    fields = [pa.field(f.name, f.type, nullable=False) for f in schema if f.name not in LISTS]
    lists = [
        pa.field(name, pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False)
        for name in LISTS
    ]
    target = pa.schema([*fields, *lists])
    query = f"SELECT * FROM '{logs}' ORDER BY user, ts"
    # DuckDB gives nullable columns in its own order; peers get what suits pyarrow best.
    table = duckdb.connect().sql(query).to_arrow_table().select(target.names)
    ids = dict.fromkeys((*IDS, "user", "ts"), "DELTA_BINARY_PACKED")
    encodings = ids | dict.fromkeys(FLOATS, "PLAIN")
    encodings |= {f"{name}.list.element": "DELTA_BINARY_PACKED" for name in LISTS}
    with pq.ParquetWriter(
        out,
        target,
        compression="none",
        use_dictionary=False,
        column_encoding=encodings,
        write_statistics=False,
    ) as writer:
        columns = [_non_null(table[field.name], field.type) for field in target]
        whole = pa.Table.from_arrays(columns, schema=target)
        writer.write_table(whole, row_group_size=BATCH_ROWS)


def _non_null(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    array = column.combine_chunks()
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, array.values, type=kind)
    return array.cast(kind)


def to_tensors(table: pa.Table) -> Batch:
    """What a peer's user writes: ids [F, N], floats [K, N], lists as values and offsets, and the
    label."""
    ids = np.stack([table[name].to_numpy() for name in IDS])
    floats = np.stack([table[name].to_numpy() for name in FLOATS])
    lists = []
    for name in LISTS:
        column = table[name].combine_chunks()
        column = column if isinstance(column, pa.Array) else column.chunk(0)
        lists += [column.flatten().to_numpy(), np.array(column.offsets)]
    arrays = (table["click"].to_numpy().astype(np.float32), ids, floats, *lists)
    return tuple(_tensor(array) for array in arrays)


def _tensor(array: np.ndarray) -> torch.Tensor:
    # Sharing read-only memory makes torch warn; DLPack does not.
    return torch.from_numpy(array) if array.flags.writeable else torch.from_dlpack(array)


def with_unique(batch: Batch) -> Batch:
    """The batch with the distinct ids of every field and the positions in them."""
    uniques = [torch.unique(row, return_inverse=True) for row in batch[1]]
    return (*batch, *(tensor for pair in uniques for tensor in pair))


def peer_dataset(path: Path) -> Iterator[Batch]:
    """pyarrow.dataset, which reads ahead in threads of its own."""
    for batch in pads.dataset(path).to_batches(batch_size=BATCH_ROWS):
        yield to_tensors(pa.Table.from_batches([batch]))


def peer_iter_batches(path: Path) -> Iterator[Batch]:
    """pyarrow's reader of one file."""
    for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS):
        yield to_tensors(pa.Table.from_batches([batch]))


def peer_iter_batches_unique(path: Path) -> Iterator[Batch]:
    yield from map(with_unique, peer_iter_batches(path))


def peer_duckdb(path: Path) -> Iterator[Batch]:
    """A query, streamed as Arrow batches."""
    connection = duckdb.connect()
    connection.execute(f"SET threads = {pa.cpu_count()}")
    for batch in connection.sql(f"SELECT * FROM '{path}'").to_arrow_reader(BATCH_ROWS):
        yield to_tensors(pa.Table.from_batches([batch]))


class _RowGroups(torch.utils.data.Dataset[Batch]):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_groups = pq.ParquetFile(path).num_row_groups

    def __len__(self) -> int:
        return self._num_groups

    def __getitem__(self, index: int) -> Batch:
        return to_tensors(pq.ParquetFile(self._path).read_row_group(index, use_threads=False))


def peer_dataloader(path: Path) -> Iterator[Batch]:
    """torch's DataLoader in this process: workers would send every tensor through a pipe."""
    yield from torch.utils.data.DataLoader(_RowGroups(path), batch_size=None, num_workers=0)


def peer_polars(path: Path) -> Iterator[Batch]:
    """A lazy scan, collected a row group at a time."""
    import polars

    groups = pq.ParquetFile(path).num_row_groups
    rows = pq.ParquetFile(path).metadata.num_rows
    for index in range(groups):
        frame = polars.scan_parquet(path).slice(index * BATCH_ROWS, min(BATCH_ROWS, rows)).collect()
        yield to_tensors(frame.to_arrow().cast(_wide(frame.to_arrow().schema)))


def _wide(schema: pa.Schema) -> pa.Schema:
    lists = {name: pa.list_(pa.int64()) for name in LISTS}
    return pa.schema([pa.field(f.name, lists.get(f.name, f.type)) for f in schema])


PEERS: dict[str, Callable[[Path], Iterator[Batch]]] = {
    "pyarrow.dataset": peer_dataset,
    "pyarrow iter_batches": peer_iter_batches,
    "iter_batches + torch.unique": peer_iter_batches_unique,
    "DuckDB stream": peer_duckdb,
    "DataLoader over row groups": peer_dataloader,
    "polars scan": peer_polars,
}


def write_mosaic(dataset: metaio.Dataset, out: Path) -> None:
    """Every block as one MDS sample, unique ids and positions included."""
    streaming = importlib.import_module("streaming")
    ranges = _block_ranges(dataset)
    columns: dict[str, str] | None = None
    writer: Any = None
    # So many tasks that a range, which is a block, is never cut.
    for batch in metaio.read_ranges(dataset, ranges, tasks_per_batch=1 << 30):
        # Without weights and row ids, of which the logs have none: it writes no empty array.
        sample = {name: own.numpy() for name, own in vars(batch).items() if own.numel()}
        if writer is None:
            columns = dict.fromkeys(sample, "ndarray")
            writer = streaming.MDSWriter(out=str(out), columns=columns)
        writer.write(sample)
    writer.finish()


def _block_ranges(dataset: metaio.Dataset) -> list[metaio.EpisodeRange]:
    split = dataset.splits["train"]
    starts = split.episode_offsets.tolist()
    lengths = split.blocks.num_episodes_Z.tolist()
    pairs = zip(starts, lengths, strict=False)
    return [metaio.EpisodeRange("train", start, count) for start, count in pairs]


def mosaic(path: Path) -> Iterator[Batch]:
    """Mosaic streaming over the samples of `write_mosaic`."""
    streaming = importlib.import_module("streaming")
    samples = streaming.StreamingDataset(local=str(path), shuffle=False, batch_size=1)
    for sample in samples:
        tensors = {name: _tensor(array) for name, array in sample.items()}
        yield (tensors["label_N"], *tensors.values())


def available_peers() -> dict[str, Callable[[Path], Iterator[Batch]]]:
    """Readers of Parquet whose packages are installed."""
    found = dict(PEERS)
    if not _imports("polars"):
        del found["polars scan"]
    return found


def has_mosaic() -> bool:
    """Whether Mosaic streaming is installed."""
    return _imports("streaming")


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"left out: {name} cannot be imported ({error})", file=sys.stderr)
        return False
    return True
