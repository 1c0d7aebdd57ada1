"""`gmeta inspect` on an exported model: the columns that it reads, and a check of its files."""

from collections.abc import Iterator
from pathlib import Path

from gmeta.cli.commands.console import make_console, make_table, print_result, show_table, size_text
from gmeta.config.table_widths import widths_of_tables
from gmeta.metrics.catalogue import predicted_by
from gmeta.serving import exported_folder
from metaio.quantities import format_count


def is_model(path: Path) -> bool:
    """Return whether `gmeta export` wrote this folder."""
    if (path / exported_folder.LAYERS_FILE).is_file():
        return True
    try:
        # A damaged model counts too: its first bytes say so, though it may not parse.
        return '"gmeta-model"' in (path / "config.json").read_text(encoding="utf-8")[:100]
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


_PREDICTED = {"probability": "clicks", "rating": "ratings", "score": "scores"}


def inspect_model(folder: Path, verify: bool) -> None:
    """Show the columns and tables of an exported model."""
    config = exported_folder.read_config(folder)
    source, console = config.source, make_console()
    console.print(
        f"model {folder}: {config.algorithm.name} with {config.model.name}, predicts "
        f"{_describe_predictions(config)}; step {source.get('step', '?')} of "
        f"{source.get('run', '?')}, exported {source.get('exported_at', '?')}"
    )
    heads = ("column", "used as", "table", "values")
    columns = make_table("Columns", *heads, text=heads)
    for row in _list_columns(config):
        columns.add_row(*row)
    show_table(console, columns)
    described = ("table", "rows", "width", "type", "bytes")
    tables = make_table("Tables", *described, text=("table", "type"))
    widths = widths_of_tables(config.features, config.model)
    for index, table in enumerate(config.features.tables):
        stored = config.files.get(exported_folder.table_file(index))
        tables.add_row(
            table.name,
            f"{table.num_rows:,}",
            str(widths[table.name]),
            config.table_format,
            size_text(stored.num_bytes) if stored else "?",
        )
    show_table(console, tables)
    exported_folder.check_files(folder, config, checksums=verify)
    print_result(
        kind="model",
        path=folder,
        algorithm=config.algorithm.name,
        model=config.model.name,
        loss=config.judged_loss,
        losses=dict(zip(config.features.labels, config.losses, strict=False)),
        source=config.source,
        columns=[dict(zip(heads, row, strict=True)) for row in _list_columns(config)],
        tables={table.name: table.num_rows for table in config.features.tables},
        table_format=config.table_format,
    )
    make_console().print(
        "complete: every file is there, and as its checksum says"
        if verify
        else "complete: every file is there in full; --verify reads them and checks checksums"
    )


def _describe_predictions(config: exported_folder.ExportedConfig) -> str:
    """Return what is predicted, in words: each of several labels with its loss."""
    names, losses = config.features.labels, config.losses
    if not names:
        return _PREDICTED[predicted_by(config.judged_loss)]
    among = config.labels.entire_space
    label_texts = [
        f"{name} ({loss}{f', among {among[name]}' if name in among else ''})"
        for name, loss in zip(names, losses, strict=True)
    ]
    return f"{', '.join(label_texts)}, judged by {names[config.judged]}"


def _list_columns(config: exported_folder.ExportedConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name, role, table and values of each column that a row must have."""
    columns, features = config.columns, config.features
    yield columns.task, "task", "", "integer or text; tells tasks apart in `gmeta predict`"
    schema = columns.schema
    names = [columns.label] if schema is None else [label.column for label in schema.labels]
    for name, loss in zip(names, config.losses, strict=True):
        yield name, "label", "", "0 to 1" if loss == "bce" else "a number"
    for name in [] if schema is None else [x for x in schema.label_columns if x not in names]:
        yield name, "label", "", "a mask of 0 and 1, or a weight, of support rows"
    if schema is None:
        # Without a schema the caller sends ids as they are in the tables.
        rows = {table.name: table.num_rows for table in features.tables}
        for role, sparse in (("single", features.single), ("multi", features.multi)):
            for one in sparse:
                yield one.name, role, one.table, f"ids 0 to {rows[one.table] - 1:,}; 0: unknown"
        for name in features.dense:
            yield name, "dense", "", "a number"
        return
    for role, described in (("single", schema.single), ("multi", schema.multi)):
        for column in described:
            nulls = "; nulls allowed" if column.null == "unknown" else ""
            kind = columns.kinds.get(column.column, "integer or text")
            yield column.column, role, column.table_name, kind + nulls
    for dense in schema.dense:
        fill = "" if dense.fill is None else f"; nulls become {dense.fill:g}"
        yield dense.column, "dense", "", f"a number{fill}"
    for vector in schema.vector:
        fill = "" if vector.fill is None else f"; nulls become {vector.fill:g}"
        yield vector.column, "vector", "", f"{format_count(vector.width, 'number')}{fill}"
