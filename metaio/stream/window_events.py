"""The events of an increment from another log: files that no increment took before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from metaio.errors import DataError
from metaio.prepare.schema.schema import TextRule
from metaio.prepare.source.input_files import list_file_names
from metaio.prepare.source.source import EventBatches, count_rows, open_event_log
from metaio.stream.taken_files import InputFile, OfferedFiles, find_duplicates, hash_file

if TYPE_CHECKING:
    from metaio.prepare.job import PrepareOptions
    from metaio.stream.description import OpenedStream


class WindowEvents(NamedTuple):
    """The event files that an increment takes, and what reads them."""

    files: list[InputFile]
    read: EventBatches


@contextmanager
def open_window_events(
    before: "OpenedStream", types: dict[str, pa.DataType], options: "PrepareOptions"
) -> Iterator[WindowEvents]:
    """Yield the event files that are new by their names. Raises DataError: one has the bytes of a
    file that was taken, or its columns are not those of the schema."""
    schema, taken = before.schema, before.state.inputs
    known = {*taken["name"].to_pylist()}
    names = [name for name in list_file_names(schema.event_files) if name not in known]
    files, text = [hash_file(name) for name in names], schema.text or TextRule()
    offered = OfferedFiles(files, files, {})
    doubled = find_duplicates(offered, taken, lambda name: count_rows([name], text) != 0)
    if doubled:
        raise DataError(next(iter(doubled.values())))
    memory_bytes, threads = options.memory_of_log(schema), options.threads
    with open_event_log(schema, names, types, memory_bytes=memory_bytes, threads=threads) as read:
        yield WindowEvents(files, read)
