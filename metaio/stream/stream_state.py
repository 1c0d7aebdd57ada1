"""What the next increment needs of all before it: the folder state/NUMBER/. Private to stream/."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from metaio.errors import FormatError, make_content_error
from metaio.format.atomic_folder import flush_to_disk
from metaio.format.checked_json import has_shape, write_checked_json
from metaio.format.manifest import xxh3_hex
from metaio.format.shard_writer import map_file
from metaio.format.storage import Storage
from metaio.prepare.schema.schema import Schema
from metaio.stream.chain import name_increment_folder, read_stream_json
from metaio.stream.newest_rows import NewestRows
from metaio.stream.numbering import Numbering

if TYPE_CHECKING:
    from metaio.stream.row_growth import RowGrowth

STATES = "state"
STATE_FILE, _FORMAT = "state.json", "gmeta-stream-state"
_INPUTS = pa.schema([("name", pa.string()), ("xxh3", pa.string()), ("increment", pa.int64())])
_SHAPE = {"files": {"": list}, "tables": {"": int}, "windows": [dict]}
# The newest and the one before: an operator may take back the newest increment.
_KEPT = 2


@dataclass(frozen=True)
class StreamState:
    """Everything that outlives an increment."""

    tables: dict[str, Numbering]
    # Every file that was taken so far.
    inputs: pa.Table = field(default_factory=_INPUTS.empty_table)
    # Statistics of recent increments, for the screen.
    windows: list[dict[str, Any]] = field(default_factory=list)
    end: int | None = None
    # LabelWindows.ripe_after and .opened; none where no label matures.
    ripe: tuple[int, ...] = ()
    opened: tuple[int, ...] = ()
    folder: Path | None = None

    def open_newest_rows(self, split: str, schema: Schema) -> NewestRows:
        """Return the newest rows of the tasks of a split."""
        return open_newest_rows(self.folder, split, schema)


def open_newest_rows(
    folder: Path | None, split: str, schema: Schema, growth: "RowGrowth | None" = None
) -> NewestRows:
    """Return the newest rows of the tasks of a split in a state's folder; none without a folder."""
    return NewestRows(name_rows_file(folder, split) if folder else None, schema, growth)


def name_rows_file(folder: Path, split: str) -> Path:
    """Return the file of the newest rows of a split's tasks in a state."""
    return folder / f"rows-{split}.arrow"


def load_state(stream: Path, number: int) -> StreamState:
    """Return the state that increment `number` left."""
    folder = stream / STATES / name_increment_folder(number)
    body = read_stream_json(Storage(str(folder)), STATE_FILE, _FORMAT)
    if not has_shape(body, _SHAPE) or not isinstance(body.get("end"), int | None):
        raise make_content_error(f"{folder / STATE_FILE}: its content is not that of a state")
    # Checked once: a damaged table would give values wrong rows in all later increments.
    for name, written in body["files"].items():
        path = folder / name
        if not path.is_file() or [path.stat().st_size, xxh3_hex(map_file(path))] != written:
            raise FormatError(
                f"{path} is missing or differs from its checksum. Put it back, or take back "
                f"increment {number} (docs/streams.md) and append it again"
            )
    tables = map_tables(folder, body["tables"])
    inputs = _read_table(folder / "inputs.arrow")
    ripe, opened = (tuple(body.get(name, ())) for name in ("ripe", "opened"))
    return StreamState(tables, inputs, body["windows"], body["end"], ripe, opened, folder)


@contextmanager
def open_new_state(stream: Path, number: int) -> Iterator[Path]:
    """Yield the folder in which the state of an increment is built; `commit_state` keeps it."""
    # Named with a dot, so that what a killed writer leaves is never taken for a state.
    partial = stream / STATES / f".{name_increment_folder(number)}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tables(partial: Path, tables: dict[str, Numbering]) -> None:
    """Write the tables of a state that is being built, for all who encode by them."""
    for name, table in tables.items():
        columns = [table.values, table.hash_U, table.row_U, table.count_U, table.last_U]
        names = ["value", "hash", "row", "count", "last"]
        _write_table(partial / f"table-{name}.arrow", pa.table(columns, names=names))


def map_tables(folder: Path, num_rows: dict[str, int]) -> dict[str, Numbering]:
    """Return the tables that `write_tables` wrote, mapped: only what is looked up is read."""
    return {
        name: _read_numbering(folder / f"table-{name}.arrow", n) for name, n in num_rows.items()
    }


def commit_state(partial: Path, state: StreamState) -> None:
    """Complete a state beside the tables and rows in `partial`, and rename it to its name."""
    # It counts only once its increment exists; until then the next writer removes it.
    _write_table(partial / "inputs.arrow", state.inputs)
    files = {}
    for path in sorted(partial.iterdir()):
        data = map_file(path)
        files[path.name] = [len(data), xxh3_hex(data)]
    flush_to_disk(partial / name for name in files)
    num_rows = {name: table.num_rows for name, table in state.tables.items()}
    body = {"files": files, "tables": num_rows, "windows": state.windows, "end": state.end}
    body |= {"ripe": list(state.ripe), "opened": list(state.opened)} if state.ripe else {}
    write_checked_json(partial / STATE_FILE, _FORMAT, body)
    target = partial.parent / partial.name.strip(".").removesuffix(".partial")
    shutil.rmtree(target, ignore_errors=True)  # of an increment that was never committed
    partial.rename(target)
    flush_to_disk([target.parent])


def remove_old_states(stream: Path, newest: int) -> None:
    """Remove the states that are not needed once increment `newest` exists."""
    for path in (stream / STATES).iterdir():
        if path.name.isdigit() and not newest - _KEPT < int(path.name) <= newest:
            shutil.rmtree(path, ignore_errors=True)


def _write_table(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _read_table(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _read_numbering(path: Path, num_rows: int) -> Numbering:
    table = _read_table(path)
    hash_U, row_U, count_U, last_U = (
        table[name].combine_chunks().to_numpy() for name in ("hash", "row", "count", "last")
    )
    return Numbering(num_rows, hash_U, table["value"].combine_chunks(), row_U, count_U, last_U)
