"""A delta: rows whose stored bytes differ from the parent version's, layers, changed values. A
chain over its base is the full export again, and is checked against that export's checksums."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gmeta.errors import GMetaError
from gmeta.platform.files.checksums import FileChecksum, describe_file
from gmeta.serving.channel.model_version import (
    DELTA_FORMAT,
    MODEL_FILE,
    ChangedRows,
    DeltaConfig,
    ParentVersion,
    Version,
    check_version,
    files_of,
    model_config,
)
from gmeta.serving.channel.table_changes import materialize_table, write_changed_rows
from gmeta.serving.channel.vocabulary_changes import (
    checksum_of,
    materialize_values,
    write_changed_values,
)
from gmeta.serving.exported_folder import (
    CONFIG_FILE,
    DELTA_FILE,
    ExportedConfig,
    read_config,
    read_vocabulary,
    row_files,
    vocabulary_file,
    write_config,
)
from metaio.format.checked_json import write_checked_json
from metaio.format.layout import write_vocabulary

_VOCABULARY = "vocabulary/"


def write_delta(old: Path, parent: ParentVersion, new: Path, out: Path) -> DeltaConfig:
    """Write into the empty folder `out` what changed from `old`, which is version `parent`."""
    before, after = read_config(old), read_config(new)
    # Matched by name: a column that was added shifts the numbers of the files.
    sources, touched = row_files(before), {}
    for name, (file, num_rows) in row_files(after).items():
        # Without a source all rows of the table are written.
        source = old / sources[name][0] if name in sources else None
        num_changed = write_changed_rows(source, new / file, out / file)
        touched[name] = ChangedRows(num_changed, num_rows)
    vocabularies = {}
    for name in _vocabularies(after):
        values = read_vocabulary(new / vocabulary_file(name))
        is_known = vocabulary_file(name) in before.files
        old_values = read_vocabulary(old / vocabulary_file(name)) if is_known else None
        write_changed_values(old_values, values, out / vocabulary_file(name))
        vocabularies[name] = checksum_of(values)
    # Layers change at every step, and take a few hundred kilobytes.
    for name in _unchunked_files(after):
        shutil.copyfile(new / name, out / name)
    shutil.copyfile(new / CONFIG_FILE, out / MODEL_FILE)
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    files = {path.relative_to(out).as_posix(): describe_file(path) for path in paths}
    full_bytes = sum(entry.num_bytes for entry in after.files.values())
    delta = DeltaConfig(parent, files, vocabularies, touched, full_bytes)
    write_checked_json(out / DELTA_FILE, DELTA_FORMAT, asdict(delta))
    return delta


def materialize_model(base: Path, deltas: Sequence[Version], out: Path) -> None:
    """Write into the empty folder `out` the model of `base` with each delta over it."""
    for delta in deltas:
        # Before any of it is used, so that an error names the delta that is damaged.
        check_version(delta)
    newest = deltas[-1]
    # Layers are the newest's alone; rows and values come from every step of the chain.
    config, start = model_config(newest), read_config(base)
    _write_tables(base, start, deltas, config, out)
    for name in _unchunked_files(config):
        shutil.copyfile(newest.folder / name, out / name)
    files = dict(config.files)
    for name, checksum in (newest.delta.vocabularies if newest.delta else {}).items():
        file = vocabulary_file(name)
        # Only what is listed was compared with a checksum.
        base_file = base / file if file in start.files else None
        changes = [one.folder / file for one in deltas if file in files_of(one)]
        values = materialize_values(base_file, changes)
        if checksum_of(values) != checksum:
            raise _altered_error(newest, file)
        write_vocabulary(values, out / file)
        # Another release of Arrow writes the same values in other bytes.
        files[file] = describe_file(out / file)
    for file, entry in files.items():
        if not (out / file).is_file() or describe_file(out / file) != entry:
            raise _altered_error(newest, file)
    # Copied where it can be: the hash of its bytes is what names the model.
    if files == config.files:
        shutil.copyfile(newest.folder / MODEL_FILE, out / CONFIG_FILE)
    else:
        write_config(out, replace(config, files=files))


def _write_tables(
    base: Path, start: ExportedConfig, deltas: Sequence[Version], config: ExportedConfig, out: Path
) -> None:
    steps = [(one, model_config(one)) for one in deltas]
    for name, (own, num_rows) in row_files(config).items():
        # By name: the number of a table's file differs where a column was added.
        known = _row_file_of(base, start, start.files, name)
        files = (_row_file_of(one.folder, each, files_of(one), name) for one, each in steps)
        changes = [file for file in files if file is not None]
        if known is None:
            raise GMetaError(
                f"version {deltas[-1].name} has table {name}, which its base {base} lacks. "
                "Export the run again without --since"
            )
        materialize_table(known, changes, out / own, name, num_rows)


def _row_file_of(
    folder: Path, config: ExportedConfig, files: Mapping[str, FileChecksum], name: str
) -> Path | None:
    file, _ = row_files(config).get(name, ("", 0))
    return folder / file if file in files else None


def _altered_error(version: Version, file: str) -> GMetaError:
    return GMetaError(
        f"version {version.name} made whole differs from its export in {file}: a version of its "
        "chain was altered. Promote a full export, or roll back"
    )


def _unchunked_files(config: ExportedConfig) -> list[str]:
    """Return what a delta holds in full: layers, and any file but tables and vocabularies."""
    tables = {file for file, _ in row_files(config).values()}
    return [name for name in config.files if name not in tables and _VOCABULARY not in name]


def _vocabularies(config: ExportedConfig) -> list[str]:
    files = [name for name in config.files if name.startswith(_VOCABULARY)]
    return [name.removeprefix(_VOCABULARY).removesuffix(".parquet") for name in files]
