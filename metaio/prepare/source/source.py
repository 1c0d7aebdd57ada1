"""Reads raw tables through DuckDB: CSV, TSV, JSON lines and Parquet on any fsspec URL."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from metaio.errors import DataError, MissingColumnError, TooFewRowsError, to_one_line
from metaio.format.atomic_folder import open_temporary_folder
from metaio.prepare.episodes.encode import check_file_nulls
from metaio.prepare.schema.event_columns import check_event_types
from metaio.prepare.schema.schema import Schema, TextRule, make_event_schema
from metaio.prepare.schema.side_columns import find_file_side, with_side
from metaio.prepare.schema.values import warn_of_mixed_units
from metaio.prepare.source import parquet_files
from metaio.prepare.source.bad_lines import (
    LENIENT,
    BadLine,
    BadRow,
    find_bad_rows,
    make_bad_lines_error,
    replace_by_copies,
    show_bad_lines,
)
from metaio.prepare.source.column_names import check_names
from metaio.prepare.source.csv_errors import (
    check_json_objects,
    explain_first_bytes,
    make_read_error,
)
from metaio.prepare.source.file_groups import FileGroup, find_wider_type, format_group, group_files
from metaio.prepare.source.input_files import expand_inputs, make_no_rows_error
from metaio.prepare.source.sql import (
    connect,
    escape_glob,
    format_paths,
    format_scan,
    format_struct,
    format_text_options,
    quote_column,
    quote_literal,
)
from metaio.prepare.source.text_lines import count_lines, read_header, shows_quotes
from metaio.prepare.source.text_types import (
    OF_NO_VALUE,
    ZONED,
    choose_null_type,
    choose_revealing_types,
    choose_types,
    explain_loss,
    list_declared_types,
    list_number_columns,
)
from metaio.prepare.source.transform import transform_inputs

# 16,384 rows of 41 encoded columns are 3 MB, which stay in the second-level cache while their
# columns are filled in: encoding takes 0.6 s a million rows, with 131,072 rows 1.5 s.
_BATCH_ROWS = 16_384

EventBatches = Callable[[], Iterator[pa.RecordBatch]]


def check_counts(schema: Schema, names: list[str], total: int, nulls: dict[str, int]) -> None:
    """Raise TooFewRowsError for files without rows, DataError for nulls that are not allowed."""
    if total == 0:
        raise make_no_rows_error(names)
    check_file_nulls(schema, nulls)


def count_rows(names: list[str], rule: TextRule) -> int | None:
    """Return how many rows files have, whatever a schema says of them; None if one is damaged."""
    with open_temporary_folder() as folder:
        try:
            files = expand_inputs(names, Path(folder))
            table = format_scan(files, files.names, format_text_options(rule))
            with connect(files, folder) as connection:
                (found,) = connection.sql(f"SELECT count(*) FROM {table}").fetchall()
        except TooFewRowsError:
            return 0
        except (DataError, duckdb.Error, OSError):
            return None
    return int(found[0])


class DuckSource:
    """The raw rows of all inputs as one table; a context manager."""

    def __init__(
        self,
        inputs: list[str],
        schema: Schema,
        *,
        memory_bytes: int,
        threads: int,
        fill: Mapping[str, str] | None = None,
    ) -> None:
        """Open the files, which may lack the columns in `fill`, given with their SQL types."""
        self._schema = schema
        self._fill = fill
        with ExitStack() as opened:
            # For unpacked archives, and for what does not fit in memory.
            self._folder = opened.enter_context(open_temporary_folder())
            self._open(inputs, memory_bytes, threads)
            self._opened = opened.pop_all()

    def _open(self, inputs: list[str], memory_bytes: int, threads: int) -> None:
        """Find the files, their columns and types; raise DataError where the schema differs."""
        schema = self._schema
        self._files = expand_inputs(inputs, Path(self._folder))
        self._connection = connect(self._files, self._folder)
        self._run(f"SET memory_limit = '{memory_bytes // (1 << 20)}MiB'")
        self._run(f"SET threads = {threads}")
        # Order costs memory: kept only where nothing else distinguishes the rows of a task.
        self._run(f"SET preserve_insertion_order = {str(schema.needs_input_order).lower()}")
        self._time = schema.time.column if schema.time else None
        self._text = schema.text or TextRule()
        # Read files, and files as given: some may be empty, others archives.
        self.names, self.given = self._files.names, self._files.given
        self.members, self.empty = self._files.members, self._files.empty
        self._options = format_text_options(self._text)
        self._by_name = ""  # set where columns of another file have another order, or no type
        self._learnt: dict[str, str] = {}  # types of columns that are null in a Parquet file
        self._widened: set[str] = set()  # columns whose types differ between Parquet files
        self._spelled: dict[str, str] = {}  # all columns, where DuckDB cannot find them out
        self._as_given, self._given_options = self._files, self._options
        rule = schema.transform
        self._types: dict[str, str] = {}
        self._casts_of: dict[str, dict[str, str]] = {}  # by file, columns of a narrower type
        self._absent_of = {} if rule else {name: self._find_absent(name) for name in self.names}
        # The types are taken of the first file with rows that has all columns, or most of them.
        by_absent = sorted(self.names, key=lambda name: len(self._absent_of.get(name, ())))
        of_rows = next(filter(self.has_rows, by_absent), None)
        first = of_rows or self.names[0]
        self.bad_lines: list[BadLine] = []  # that were left out
        self._first = self.names.index(first)
        if self._files.kind == "text" and not shows_quotes(first, self._text.encoding):
            # DuckDB would take quotes of later lines for part of their values.
            self._options += ", quote = '\"', escape = '\"'"
        self._folders = self._find_folder_columns(first, rule.columns if rule else schema.columns)
        for name in self.names if self._folders else ():
            if self._find_folder_columns(name, self._folders) != self._folders:
                raise DataError(
                    f"input {name} has no column {self._folders[0]} in the name of a folder alone, "
                    f"as {first} has. Make the files agree, or rename that folder"
                )
        if self._files.kind == "text" and self._text.bad_lines == "skip":
            names = [*self.names]
            self._files = replace(self._files, names=names)
            with self._translate_errors(""):
                copying = self._text, self._folder, self._find_bad_rows, self._describe_file
                self.bad_lines = replace_by_copies(names, *copying)
            copies = zip(names, self.names, strict=True)
            self._absent_of = {copy: self._absent_of.get(name, []) for copy, name in copies}
            first = names[self._first]
        given_as = dict(zip(self._files.names, self.names, strict=True))
        if rule is not None:
            out, columns = Path(self._folder, "transformed"), schema.columns
            self._files = transform_inputs(self._files, rule, columns, self._raw_batches, out)
            first, self._folders = self._files.names[0], []
        self._types = self._infer_column_types(first)
        others = [name for name in self._files.names if name != first]
        if self._files.kind != "text":
            self._learn_types(others)
        self._take_absent_types(first, others)
        self._check_columns(first)
        if of_rows is None and rule is None:
            raise make_no_rows_error(self.names, self.given)
        left_out = {name for name in others if not self._has_same_types(name, first)}
        if self._widened:
            self._casts_of = {name: self._find_casts(name) for name in self._files.names}
            self._learnt = {column: self._types[column] for column in self._learnt}
        if self._files.kind == "Parquet" and self._learnt:
            self._by_name = ", union_by_name = true"
        self.names = [name for name in self.names if name not in left_out]
        kept = [name for name in self._files.names if name not in left_out]
        self._files = replace(self._files, names=kept)
        self._side_of = {
            name: find_file_side(schema.membership, given_as.get(name, name)) for name in kept
        }
        if self._files.kind == "Parquet":
            self._check_durations()
        # All files are read with the first one's types: a row that does not fit is refused by name,
        # instead of turning a column into text.
        kind = self._files.kind
        self._asked = {} if kind == "Parquet" else choose_types(schema, self._types, kind)
        self._table = self._scan(self._files.names, self._asked)
        self.left_out = {"empty_files": len(self._files.empty)}

    def _find_absent(self, name: str) -> list[str]:
        """Return the columns that a file lacks and may lack; of JSON only all files tell."""
        if not self._fill or self._files.kind == "JSON":
            return []
        # Without types: DuckDB takes none for a column that is not there. What cannot be described
        # is refused where types are inferred.
        table = format_scan(self._files, [name], self._options)
        with suppress(duckdb.Error):
            rows = self._connection.sql(f"DESCRIBE SELECT * FROM {table}").fetchall()
            return [column for column in self._fill if column not in {row[0] for row in rows}]
        return []

    def _take_absent_types(self, first: str, others: list[str]) -> None:
        """Set the types of columns that the first file lacks and may lack."""
        absent = self._absent_of.get(first, [])
        if self._files.kind == "JSON":
            absent = [column for column in self._fill or () if column not in self._types]
            self._absent_of = dict.fromkeys(self._files.names, absent) if absent else {}
        for name in others if absent and self._files.kind != "JSON" else ():
            # Of another file that has it, by whose values it is compared.
            known = {c: kind for c, kind in self._infer_column_types(name).items() if c in absent}
            self._types = known | self._types
        self._types = {c: (self._fill or {})[c] for c in absent} | self._types

    def _find_casts(self, name: str) -> dict[str, str]:
        types = self._infer_column_types(name)
        own = {c: types[c] for c in self._widened if types.get(c) not in OF_NO_VALUE}
        return {c: self._types[c] for c, kind in own.items() if kind != self._types[c]}

    @property
    def groups(self) -> list[FileGroup]:
        """Return the files, in groups where some lack columns or hold narrower types."""
        return self._group(self._files.names, {})

    def _group(self, names: Iterable[str], types: Mapping[str, str]) -> list[FileGroup]:
        absent = {} if self._files.kind == "JSON" else self._absent_of
        return group_files(names, absent, self._casts_of, {**self._types, **types})

    def count_absent(self) -> dict[str, int]:
        """Return by column how many rows are of files that lack it."""
        found = {}
        for column in dict.fromkeys(c for absent in self._absent_of.values() for c in absent):
            names = [name for name in self._files.names if column in self._absent_of.get(name, ())]
            counts = f"count(*) - count({quote_column(column)})"
            if names:
                table = self._scan(names, self._asked)
                ((found[column],),) = self._fetch(f"SELECT {counts} FROM {table}")
        return found

    def has_rows(self, name: str) -> bool:
        """Return whether a file has any row, even one that cannot be read."""
        table = format_scan(self._as_given, [name], self._given_options)
        try:
            return bool(self._connection.sql(f"SELECT 1 FROM {table} LIMIT 1").fetchall())
        except duckdb.Error:
            return True

    def _find_folder_columns(self, name: str, wanted: Sequence[str]) -> list[str]:
        """Return the wanted columns ([]: all) that only names of folders such as day=1 hold."""
        has_folder_columns = [
            c for c in re.findall(r"([^/=]+)=[^/]*/", name) if c in wanted or not wanted
        ]
        # Read without folders: DuckDB would prefer their columns to those of the file.
        table = format_scan(self._files, [name], self._options, folders=False)
        found = self._fetch(f"DESCRIBE SELECT * FROM {table}", name) if has_folder_columns else []
        own = [row[0] for row in found]
        lacking = [column for column in has_folder_columns if column not in own]
        in_file = [column for column in has_folder_columns if column in own]
        # Half of them would come from the file, half from its path: most likely a mistake.
        if lacking and in_file:
            raise DataError(
                f"input {name} has a column {in_file[0]} of its own, and {lacking[0]} only in "
                f"the name of a folder. Rename the folder {in_file[0]}=..., or {lacking[0]}=..."
            )
        return lacking

    def _list_bad_lines(self) -> DataError | None:
        """Return the error that names all lines that cannot be read; None if DuckDB finds none."""
        shown: list[BadLine] = []
        with suppress(duckdb.Error, DataError):
            found = self._find_bad_rows(range(len(self._files.names)))
            for index, rows in found.items():
                given = self._describe_file(self.names[index])
                shown += show_bad_lines(self._files.names[index], self._text.encoding, rows, given)
            if shown:
                return make_bad_lines_error(sum(map(len, found.values())), shown)
        return None

    def _describe_file(self, name: str) -> str:
        member = self.members.get(name)
        return f"{member.archive}/{member.path}" if member else name

    def _find_bad_rows(self, places: Iterable[int]) -> dict[int, list[BadRow]]:
        """Return the rows that cannot be read, by their text files' places among the names."""
        schema, names = self._schema, self._files.names
        columns = [*(schema.transform.columns if schema.transform else schema.columns)]
        query = f"DESCRIBE SELECT * FROM {self._scan([names[self._first]], None, LENIENT)}"
        guessed = {row[0]: row[1] for row in self._connection.execute(query).fetchall()}
        types: dict[str, str] = {}
        if schema.transform is None and guessed.keys() >= {*columns}:
            types = choose_types(schema, guessed, self._files.kind)
            # Ids beyond 64 bits with a sign are found later (survey).
            types |= {c: "HUGEINT" for c, kind in types.items() if kind == "BIGINT"}
        columns = [c for c in columns if c in guessed]
        counts = ", ".join(f"count({quote_column(c)})" for c in columns) or "count(COLUMNS(*))"
        tables = {place: self._scan([names[place]], types, LENIENT) for place in places}
        queries = {place: f"SELECT {counts} FROM {table}" for place, table in tables.items()}
        found = {place: find_bad_rows(self._connection, query) for place, query in queries.items()}
        return {place: rows for place, rows in found.items() if rows}

    def _scan(self, names: list[str], types: dict[str, str] | None, more: str = "") -> str:
        """Return the table that these files are, with these types where given."""
        groups = self._group(names, types or {})
        if len(groups) == 1 and not groups[0].casts and not groups[0].absent:
            return self._scan_alike(names, types, more)
        queries = [format_group(one, self._scan_alike([*one.names], types, more)) for one in groups]
        return f"({' UNION ALL BY NAME '.join(queries)})"

    def _scan_alike(self, names: list[str], types: dict[str, str] | None, more: str = "") -> str:
        """Return the table function that reads files with the same columns."""
        columns = f", columns = {format_struct(types)}" if types else ""
        columns = self._by_name if self._files.kind == "Parquet" else columns
        typed = self._spelled | list_declared_types(self._schema) | (types or {})
        absent = self._absent_of.get(names[0], ()) if self._files.kind == "text" else ()
        typed = {column: kind for column, kind in typed.items() if column not in absent}
        of_folders = {c: typed.pop(c) for c in self._folders if c in typed}
        option = "columns" if self._spelled else "types"
        declared = f", {option} = {format_struct(typed)}" if typed else ""
        declared += f", hive_types = {format_struct(of_folders)}" if of_folders else ""
        options = f"{self._options}{declared}{more or self._by_name}"
        return format_scan(self._files, names, options, columns, bool(self._folders))

    def _infer_column_types(self, name: str) -> dict[str, str]:
        """Return the SQL type of each column of a file, by its first rows."""
        describe = f"DESCRIBE SELECT * FROM {self._scan_alike([name], None)}"
        try:
            rows = self._connection.sql(describe).fetchall()
        except duckdb.InvalidInputException as error:
            if "Invalid unicode" not in str(error):
                self._check_ragged_rows(name)
                raise self._make_error(error, name) from error
            self._spell_out(name, error)
            rows = self._fetch(f"DESCRIBE SELECT * FROM {self._scan_alike([name], None)}", name)
        except duckdb.Error as error:
            raise self._make_error(error, name) from error
        types = {row[0]: row[1] for row in rows}
        if self._files.kind == "JSON":
            check_json_objects(name, list(types))
            sql_types = list_declared_types(self._schema).items()
            is_list = {column for column, kind in types.items() if kind.endswith("[]")}
            types |= {c: kind for c, kind in sql_types if c in types and c not in is_list}
        wanted = self._schema.columns
        with self._translate_errors(name):
            check_names(self._connection, self._files, name, self._options, types, wanted)
        return types

    def _spell_out(self, name: str, error: duckdb.Error) -> None:
        """Set the types that DuckDB cannot infer where an unread column is not UTF-8."""
        names = [name, *self._files.names]
        headers = [read_header(one, self._text, self._schema.columns) for one in names]
        if not headers[0][1] or headers.count(headers[0]) < len(headers):
            raise self._make_error(error, name) from error
        options = f"{self._options}, ignore_errors = true"
        *_, columns, _, _, _, call = self._fetch(
            f"SELECT * FROM sniff_csv({quote_literal(escape_glob(name))}, {options})", name
        )[0]
        found = re.search(r"auto_detect=false.*?(?=, columns=)", call)
        if found:
            self._options += f", {found[0]}"
            self._spelled = {part["name"]: part["type"] for part in columns}

    def _learn_types(self, others: list[str]) -> None:
        """Take the types of columns without a value in the first file from other files."""
        of_none = OF_NO_VALUE if self._files.kind == "JSON" else OF_NO_VALUE[1:]
        unknown = {c for c in self._schema.columns if self._types.get(c) in of_none}
        for name in others if unknown else ():
            types = self._infer_column_types(name)
            learnt = {c: types[c] for c in unknown & types.keys() if types[c] not in of_none}
            unknown -= learnt.keys()
            self._learnt |= learnt
        self._types |= self._learnt
        if self._files.kind == "JSON":
            found = unknown & self._types.keys()
            self._types |= {c: choose_null_type(self._schema, c) for c in found}

    def _check_columns(self, name: str) -> None:
        numbers = {*self._schema.label_columns, *(column.column for column in self._schema.dense)}
        for column in self._schema.columns:
            if column not in self._types:
                self._check_ragged_rows(name)
                near = difflib.get_close_matches(column, self._types, n=1)
                names = to_one_line(", ".join(self._types), 300)
                hint = f"did you mean {near[0]}?" if near else f"it has {names}."
                remedy = "Correct the schema"
                if self._files.kind == "text" and len(self._types) == 1:
                    remedy = "Name what separates the values: separator under [text] in the schema"
                elif self._fill is not None:
                    remedy += ', or say what its null is: null = "unknown", or fill = VALUE'
                raise MissingColumnError(f"input {name} has no column {column}; {hint} {remedy}")
            if self._types[column] == "JSON" and column not in numbers:
                raise DataError(
                    f"column {column} of input {name} holds values of several kinds, or none. "
                    "Write all as text or all as integers, or declare the column's type in the "
                    "schema"
                )

    def _check_ragged_rows(self, name: str) -> None:
        """Raise DataError for the row that kept DuckDB from finding the columns, if any did."""
        if self._files.kind != "text":
            return
        with self._translate_errors(name):
            num_lines, num_blank, _ = count_lines([name], self._text.encoding, "")
        if num_lines == num_blank:
            raise DataError(f"input {name} holds only blank lines. Remove it, or write its rows")
        if fault := explain_first_bytes(name):
            raise DataError(fault)
        if error := self._list_bad_lines():
            raise error

    def _has_same_types(self, name: str, first: str) -> bool:
        """Return whether a file's types are the first one's; raise DataError if rows contradict."""
        wanted = {column: self._types[column] for column in self._schema.columns}
        types, agrees = self._infer_column_types(name), True
        if self._files.kind == "text" and [*types] != [*self._types]:
            self._by_name = ", union_by_name = true"
        for column, kind in wanted.items():
            if column not in types:
                if self._files.kind == "JSON" or column in self._absent_of.get(name, ()):
                    continue  # null in all of its rows
                self._check_ragged_rows(name)
                raise MissingColumnError(
                    f"input {name} has no column {column}, but {first} has. Make the files agree"
                )
            # Types of text are guesses, and rows that do not fit are refused later; but the zone of
            # a time would be dropped without a word.
            zones = (types[column] == ZONED) != (kind == ZONED) and column == self._time
            if self._files.kind == "Parquet" and types[column] in OF_NO_VALUE:
                self._learnt[column] = kind  # null in all of its rows, whatever their type
                continue
            if types[column] != kind and (self._files.kind == "Parquet" or zones):
                as_number = column in list_number_columns(self._schema)
                wider = find_wider_type(types[column], kind, as_number)
                if wider is not None and not zones:
                    self._types[column] = wider
                    self._widened.add(column)
                    continue
                if self.has_rows(name):
                    raise DataError(
                        f"column {column} is {types[column]} in {name} and {kind} in {first}. "
                        "Cast one of them, so that all files agree"
                    )
                agrees = self._files.kind != "Parquet"  # without rows pandas knows no types
        return agrees

    def _check_durations(self) -> None:
        """Raise DataError for a column of durations."""
        found = self._fetch(
            f"SELECT file_name, value FROM parquet_kv_metadata({format_paths(self._files.names)}) "
            "WHERE key = 'ARROW:schema'::BLOB ORDER BY file_name"
        )
        parquet_files.check_durations(found, self._schema.columns)

    @property
    def columns(self) -> list[str]:
        """Return all columns of the first file, unread ones included."""
        return list(self._types)

    def survey(self) -> int:
        """Return the number of rows; raise DataError for nulls and values that a type would cut."""
        columns = self._schema.columns
        counts = ", ".join(f"count({quote_column(column)})" for column in columns)
        revealing = choose_revealing_types(self._schema, self._asked, self._files.kind)
        lost = "".join(f", {value}" for _, value in revealing.values())
        ids = [c for c in columns if self._asked.get(c) == "BIGINT" and c != self._time]
        # As doubles, which show integers beyond 64 bits instead of failing on them.
        numbers = [f"TRY_CAST({quote_column(c)} AS DOUBLE)" for c in ids]
        bounds = "".join(f", min({c}), max({c})" for c in numbers)
        powers, time_type = "NULL", (self._types | self._asked).get(self._time or "", "")
        if re.fullmatch(r"U?(BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL.*", time_type):
            times = f"nullif(abs({quote_column(self._time or '')}::DOUBLE), 0)"
            powers = f"list(DISTINCT floor(log10({times})))"
        types = self._asked | {column: kind for column, (kind, _) in revealing.items()}
        table = self._scan(self._files.names, types)
        query = f"SELECT count(*), {counts}{lost}{bounds}, {powers} FROM {table}"
        total, *found, magnitudes = self._fetch(query)[0]
        present, values = found[: len(columns)], found[len(columns) :]
        nulls = {c: total - n for c, n in zip(columns, present, strict=True)}
        check_counts(self._schema, self.names, total, nulls)
        for column, value in zip(revealing, values, strict=False):
            if value is not None:
                kind = self._asked[column]
                if self._files.kind == "text":  # other values are refused with their line
                    own = "DOUBLE" if kind == "BIGINT" else kind
                    table = self._scan(self._files.names, types | {column: own})
                    self._fetch(f"SELECT count({quote_column(column)}) FROM {table}")
                raise DataError(explain_loss(self._schema, column, kind, value))
        limits = iter(values[len(revealing) :])
        for column, least, most in zip(ids, limits, limits, strict=True):
            # As a float 2^63 - 1 equals 2^63: as unsigned numbers both keep their bits.
            if most is not None and most >= 2.0**63 and least >= 0:
                self._asked[column] = "UBIGINT"
        warn_of_mixed_units(self._time or "", magnitudes or ())
        self._table = self._scan(self._files.names, self._asked)
        if self._files.kind == "text":
            self._count_lines(int(total))
        return int(total)

    def _count_lines(self, num_rows: int) -> None:
        """Count lines that are no rows, of which DuckDB says nothing."""
        with self._translate_errors(""):
            found = count_lines(self._files.names, self._text.encoding, self._text.comment)
        num_lines, num_blank, num_comments = found
        num_blank -= len(self.bad_lines)  # which are blank in the copies
        num_filled = num_lines - num_blank - num_comments - len(self.bad_lines)
        # Quoted values may hold blank lines, too: then the count is an upper bound.
        is_exact = num_filled == num_rows + len(self._files.names)
        blank = "blank_lines" if is_exact else "blank_lines_at_most"
        self.left_out |= {"comment_lines": num_comments, blank: num_blank}
        self.left_out["bad_lines"] = len(self.bad_lines)

    def find_distinct(self, column: str) -> list[str]:
        """Return the sorted distinct values of a column, as text."""
        text = f"CAST({quote_column(column)} AS VARCHAR)"
        query = f"SELECT DISTINCT {text} FROM {self._table} ORDER BY 1"
        return [row[0] for row in self._fetch(query)]

    def arrow_types(self, columns: list[str]) -> dict[str, pa.DataType]:
        """Return the Arrow types of the columns."""
        with self._translate_errors(""):
            query = f"{self._select(columns, self._table)} LIMIT 0"
            empty = self._connection.sql(query).to_arrow_table()
        return dict(zip(columns, empty.schema.types, strict=True))

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows in batches that share nothing; in order where the schema needs that."""
        if not self._arrow_gives_the_same and not any(self._side_of.values()):
            yield from self._stream(self._select(columns, self._table), "")
            return
        for name in self._files.names:
            query = self._select(columns, self._scan([name], self._asked))
            found = self._stream(query, name)
            if self._arrow_gives_the_same:
                found = parquet_files.batches(name, columns, _BATCH_ROWS)
            with self._translate_errors(name):
                yield from (with_side(batch, self._side_of[name]) for batch in found)

    def read_all_columns(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows with the columns that the schema does not name, too."""
        # Of JSON those alone are read that have a type.
        types = self._types | self._asked if self._files.kind == "JSON" else self._asked
        return self._stream(self._select(self.columns, self._scan(self._files.names, types)), "")

    def _raw_batches(self, name: str, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file unchanged: of these columns, or of all."""
        chosen = ", ".join(map(quote_column, columns)) or "*"
        return self._stream(f"SELECT {chosen} FROM {self._scan([name], None)}", name)

    def _stream(self, query: str, name: str) -> Iterator[pa.RecordBatch]:
        with self._translate_errors(name):
            yield from self._connection.sql(query).to_arrow_reader(_BATCH_ROWS)

    def _select(self, columns: list[str], table: str) -> str:
        """Return the query for these columns of a table, times of a format as timestamps."""
        parts = [quote_column(column) for column in columns]
        if self._files.kind == "Parquet":
            for column in self._learnt.keys() & {*columns}:
                name = quote_column(column)
                parts[columns.index(column)] = f"CAST({name} AS {self._learnt[column]}) AS {name}"
        rule = self._schema.time
        if rule is not None and rule.format is not None and rule.column in columns:
            name, given = quote_column(rule.column), quote_literal(rule.format)
            parts[columns.index(rule.column)] = f"strptime({name}, {given}) AS {name}"
        return f"SELECT {', '.join(parts)} FROM {table}"

    @cached_property
    def _arrow_gives_the_same(self) -> bool:
        # pyarrow neither parses times of a format nor adds the columns of folders.
        of_format = self._schema.time is not None and self._schema.time.format is not None
        if self._files.kind != "Parquet" or of_format or self._folders:
            return False
        types = self.arrow_types(self._schema.columns)
        return all(parquet_files.holds(name, types) for name in self._files.names)

    def _run(self, statement: str) -> None:
        self._connection.execute(statement)

    def _fetch(self, query: str, name: str = "") -> list[tuple[Any, ...]]:
        with self._translate_errors(name):
            rows: list[tuple[Any, ...]] = self._connection.sql(query).fetchall()
        return rows

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, duckdb.Error, OSError) as error:
            raise self._make_error(error, name) from error

    def _make_error(self, error: Exception, name: str) -> DataError:
        is_read = not isinstance(error, duckdb.OutOfMemoryException | duckdb.IOException | OSError)
        made = make_read_error(error, name, self._files.kind)
        if self._files.kind == "text" and is_read and explain_first_bytes(name) is None:
            return self._list_bad_lines() or made
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._opened.close()


@contextmanager
def open_event_log(
    schema: Schema,
    names: list[str],
    types: dict[str, pa.DataType],
    *,
    memory_bytes: int,
    threads: int,
) -> Iterator[EventBatches]:
    """Yield what reads the events of these files, whose tasks and times are as those of a log with
    these types; without files there are none. Raises DataError: a column is missing, of another
    type, or has nulls."""
    if not names:
        yield lambda: iter(())
        return
    own = make_event_schema(schema)
    with DuckSource(names, own, memory_bytes=memory_bytes, threads=threads) as source:
        check_event_types(schema, types, source.arrow_types(own.columns))
        source.survey()
        yield partial(source.batches, own.columns)
