"""A run as a channel's next version, for `gmeta export --since` and `gmeta channel promote`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.cli.commands.console import size_text
from gmeta.errors import UserError
from gmeta.serving.channel.channel import CURRENT_FILE, Channel, is_channel
from gmeta.serving.channel.model_version import Version
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.export import export_run
from gmeta.serving.exported_folder import check_free
from gmeta.serving.model_loader import load
from gmeta.serving.table_format import TableFormat
from metaio.format.atomic_folder import lock_writer


def export_since(
    run: Path, out: Path, since: Path, tables: TableFormat, step: int | None, overwrite: bool
) -> tuple[Version, str]:
    """Return the version that was written and, if it is not a delta, why."""
    check_free(out, overwrite)
    with temporary_beside(out, str(out)) as full_export:
        # A delta is what differs between two full models: the run's is exported first, beside
        # `out`.
        export_run(run, full_export, tables, step, overwrite=True, load=load)
        return pack(open_or_new_channel(since), full_export, out, overwrite)


def describe_version(version: Version) -> str:
    """Return a line on a version: its kind, rows and size."""
    if version.delta is None:
        return f"full, {size_text(version.num_bytes)}"
    rows = sum(each.rows for each in version.delta.touched.values())
    num_rows = sum(each.num_rows for each in version.delta.touched.values())
    return (
        f"delta over version {version.delta.parent.number}: {rows:,} of {num_rows:,} rows, "
        f"{size_text(version.num_bytes)} of {size_text(version.full_bytes)}"
    )


def open_or_new_channel(root: Path) -> Channel:
    """Return the channel at a path, which may be new. Raises UserError where something else is."""
    # A killed promotion leaves names that begin with a dot.
    entries = root.iterdir() if root.is_dir() else [root] if root.exists() else []
    if not is_channel(root) and any(not path.name.startswith(".") for path in entries):
        raise UserError(
            f"{root} is no channel: there is no {CURRENT_FILE}, but something else. Give the "
            "folder of a channel, or one that does not exist yet"
        )
    return Channel(root)


@contextmanager
def temporary_beside(out: Path, name: str) -> Iterator[Path]:
    """Yield a path beside `out` to make something at, and remove what is left there at the end."""
    # On the file system of `out`: files can be linked or renamed from there.
    path = out.parent / f".{out.name}.whole"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes that write `name` would remove each other's files.
    with lock_writer(path.with_name(f"{path.name}.lock"), name, remedy="Wait for it"):
        # A killed process leaves its folder.
        shutil.rmtree(path, ignore_errors=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
