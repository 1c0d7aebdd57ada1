"""A dataset exists whole or not at all: kills, errors, full disks, two writers at once."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from metaio import DataError, FormatError, MetaIOError, Provenance, open_dataset, write_dataset
from metaio.format.atomic_folder import find_unfinished
from metaio.format.dataset_writer import find_block_bounds
from tests.metaio.conftest import FEATURES, WriteFn, episodes_of_rows, make_rows, whole_split
from tests.support.refusals import catch_message

PROVENANCE = Provenance("user", "click")

SLOW_WRITER = """
import sys, time
sys.path.insert(0, {root!r})
from metaio import write_dataset
from tests.metaio.conftest import FEATURES, make_rows
from tests.metaio.format.test_writer import PROVENANCE
with write_dataset({out!r}, FEATURES, PROVENANCE, block_rows=10, overwrite=True) as writer:
    writer.split("train").write(make_rows(20))
    print("written", flush=True)
    time.sleep(600)
"""


def start_slow_writer(out: Path) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[3])
    code = SLOW_WRITER.format(root=root, out=str(out))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def test_a_killed_writer_leaves_temporary_names_only_and_a_rerun_cleans_up(tmp_path: Path) -> None:
    out = tmp_path / "data"
    process = start_slow_writer(out)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()  # type: ignore[union-attr]
    assert all(path.name.startswith(".data.") for path in tmp_path.iterdir())
    with pytest.raises(MetaIOError):
        open_dataset(str(tmp_path / ".data.partial"))
    assert find_unfinished(str(out)) == tmp_path / ".data.partial"
    with write_dataset(str(out), FEATURES, PROVENANCE) as writer:
        writer.split("train").write(make_rows(3))
        assert find_unfinished(str(out)) is None  # it is being written now
    assert find_unfinished(str(out)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_two_writers_of_one_dataset_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "data"
    process = start_slow_writer(out)
    try:
        with pytest.raises(DataError) as caught, write_dataset(str(out), FEATURES, PROVENANCE):
            pass
        assert str(caught.value) == (
            f"process {process.pid} on {socket.gethostname()} is writing {out}. Wait for it, or "
            "choose another place"
        )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with write_dataset(str(tmp_path / "data"), FEATURES, PROVENANCE, block_rows=5) as writer:
            writer.split("train").write(make_rows(20))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("metaio.format.shard_writer.pq.ParquetWriter.write_table", full)
    with (
        pytest.raises(DataError) as caught,
        write_dataset(str(tmp_path / "data"), FEATURES, PROVENANCE) as writer,
    ):
        writer.split("train").write(make_rows(20))
    assert str(caught.value) == (
        f"{tmp_path}/data could not be written: [Errno 28] No space left on device. "
        "Free space or choose another place"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_existing_dataset_is_kept_unless_overwritten(write: WriteFn) -> None:
    path = write({"train": make_rows(3)})
    assert catch_message(DataError, write, {"train": make_rows(4)}) == (
        f"{path} holds a dataset already. Choose another place, or pass --overwrite to replace it"
    )
    assert open_dataset(path).splits["train"].num_episodes == 3
    write({"train": make_rows(4)}, overwrite=True)
    assert open_dataset(path).splits["train"].num_episodes == 4


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DataError) as caught, write_dataset(str(tmp_path), FEATURES, PROVENANCE):
        pass
    assert str(caught.value) == (
        f"{tmp_path} exists and is not a dataset. Choose a place that is empty or does not exist"
    )


def test_portions_of_any_size_give_the_same_episodes(tmp_path: Path) -> None:
    rows = [make_rows(7, seed) for seed in range(9)]
    with write_dataset(
        str(tmp_path / "data"), FEATURES, PROVENANCE, block_rows=30, shard_blocks=2
    ) as writer:
        for part in rows:
            writer.split("train").write(part)
    dataset = open_dataset(str(tmp_path / "data"))
    assert whole_split(dataset, "train") == [e for part in rows for e in episodes_of_rows(part)]
    assert max(shard.num_blocks for shard in dataset.splits["train"].shards) == 2


def test_an_episode_longer_than_a_block_is_a_block_of_its_own() -> None:
    assert find_block_bounds(np.array([2, 9, 2, 2, 9]), 4) == [0, 1, 2, 4, 5]


def test_ids_outside_their_table_are_refused(write: WriteFn) -> None:
    rows = make_rows(3)
    rows.ids_NF[0, 1] = 8
    assert catch_message(DataError, write, {"train": rows}) == (
        "feature age holds id 8, its table has ids 0 to 7. Raise the table's rows, or let prepare "
        "hash the column into them"
    )


def test_a_dataset_travels_through_a_remote_file_system(write: WriteFn) -> None:
    import fsspec

    rows = make_rows(30)
    write({"train": rows}, name="local", block_rows=40)
    url = f"memory://bucket-{time.time_ns()}/data"
    with write_dataset(url, FEATURES, PROVENANCE, block_rows=40) as writer:
        writer.split("train").write(rows)
    dataset = open_dataset(url)
    assert whole_split(dataset, "train") == episodes_of_rows(rows)
    fs = fsspec.filesystem("memory")
    name = f"{url.removeprefix('memory:/')}/train/00000.rows.parquet"
    fs.pipe(name, fs.cat(name)[:50])
    with pytest.raises(FormatError) as caught:
        whole_split(open_dataset(url), "train")
    assert "train/00000.rows.parquet" in str(caught.value)
