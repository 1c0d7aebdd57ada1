"""`gmeta adapt`: the same states in any order of rows and processes; whole files or none."""

import json
import multiprocessing as mp
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import GMetaError
from gmeta.serving.offline import adapt_job as job
from gmeta.serving.offline.adapt_job import MODEL_KEY, adapt_files
from gmeta.serving.offline.states import adapt_tasks
from tests.support.commands import gmeta as run_gmeta
from tests.support.exported import random_rows, write_random_model
from tests.support.waiting import PATIENCE_S, wait_until

TASKS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("job") / "model"
    write_random_model(out, algorithm=AlgorithmConfig(inner_steps=1, inner_lr=0.3))
    return out


@pytest.fixture(scope="module")
def support() -> pa.Table:
    return random_rows(90, seed=1, num_tasks=TASKS)


@pytest.fixture
def files(tmp_path: Path, support: pa.Table) -> Path:
    """The rows in three files, whose names are in the order of the rows."""
    folder = tmp_path / "support"
    folder.mkdir()
    for place, first in enumerate(range(0, 90, 30)):
        pq.write_table(support.slice(first, 30), folder / f"part-{place}.parquet")
    return folder


def expected(model: Path, support: pa.Table) -> pa.Table:
    """The states of the tasks in their order, each task's rows in the order of the files."""
    order = np.argsort(support["user"].to_numpy(), kind="stable")
    return adapt_tasks(gmeta.load(model), support.take(pa.array(order))).sort_by("task")


def test_json_lines_give_the_states_of_parquet(
    model: Path, support: pa.Table, tmp_path: Path
) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in support.to_pylist()))
    written = adapt_files(model, [str(lines)], tmp_path / "s.parquet", 1, True, lambda *_: None)
    assert (written.num_tasks, written.num_rows) == (TASKS, 90)
    found = pq.read_table(tmp_path / "s.parquet").sort_by("task")
    assert found["state"].equals(expected(model, support)["state"])


@pytest.mark.parametrize("processes", [1, 2])
def test_the_file_holds_the_state_of_each_task(
    model: Path, support: pa.Table, files: Path, tmp_path: Path, processes: int
) -> None:
    out = tmp_path / "states.parquet"
    result = run_gmeta(
        "adapt", model, f"{files}/*.parquet", "--out", out, "--processes", str(processes)
    )
    assert result.returncode == 0, result.stderr
    assert f"adapted: {out}  ({TASKS} tasks of 90 rows, " in result.stderr
    found = pq.read_table(out)
    assert found.sort_by("task").equals(expected(model, support))
    assert found.schema.metadata[MODEL_KEY].decode() == gmeta.load(model).checksum
    assert {path.name for path in tmp_path.iterdir()} == {"support", "states.parquet"}


@pytest.mark.parametrize("processes", [1, 2])
def test_many_chunks_are_written_in_order(
    model: Path, support: pa.Table, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    processes: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(job, "CHUNK_ROWS", 8)
    told: list[tuple[int, int]] = []
    out = tmp_path / "states.parquet"
    tell = lambda done, total: told.append((done, total))  # noqa: E731
    written = adapt_files(model, [str(files)], out, processes, True, tell, part_rows=40)
    assert (written.num_tasks, written.num_rows) == (TASKS, 90)
    assert len(told) > 6
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (180, 180)
    rows = pq.read_table(out)
    assert pq.ParquetFile(out).num_row_groups > 3
    rows = rows.sort_by("task")
    wanted = expected(model, support)
    assert rows["task"].equals(wanted["task"])
    assert rows["rows"].equals(wanted["rows"])
    # The chunks are other batches than the whole: the last bit of a float may differ.
    served, query = gmeta.load(model), random_rows(3, seed=2)
    for mine, yours in zip(rows["state"].to_pylist(), wanted["state"].to_pylist(), strict=True):
        difference = served.task(mine).predict(query) - served.task(yours).predict(query)
        assert float(difference.abs().max()) < 1e-6


def test_a_file_is_replaced_only_when_told_and_never_by_its_own_rows(
    model: Path, files: Path, tmp_path: Path
) -> None:
    first = files / "part-0.parquet"
    for given in (files, first, files / "part-*.parquet"):
        result = run_gmeta("adapt", model, given, "--out", first, "--overwrite")
        assert result.returncode == 2
        told = f"--out = '{first}' is a file of SUPPORT, whose rows would be replaced"
        assert told in result.stderr
    taken = run_gmeta("adapt", model, files / "part-1.parquet", "--out", first)
    assert taken.returncode == 2
    assert f"--out = '{first}' exists already. Name another file, or pass" in taken.stderr


def failing(tmp_path: Path, model: Path, table: pa.Table | None) -> str:
    """The line that an input is refused with, which leaves nothing."""
    given = tmp_path / "in.parquet"
    if table is not None:
        pq.write_table(table, given)
    result = run_gmeta("adapt", model, given, "--out", tmp_path / "states.parquet")
    assert result.returncode in (1, 2)
    assert {path.name for path in tmp_path.iterdir()} <= {"in.parquet"}
    (line,) = result.stderr.strip().splitlines()
    return line


def test_wrong_input_is_told_in_a_line_and_leaves_nothing(
    model: Path, support: pa.Table, tmp_path: Path
) -> None:
    given = tmp_path / "in.parquet"
    assert f"{given} does not exist. Check the path" in failing(tmp_path, model, None)
    given.write_bytes(b"PAR1 is not enough")
    assert f"{given} cannot be read as Parquet: " in failing(tmp_path, model, None)
    given.unlink()
    renamed = support.rename_columns(["user", "itme", *support.column_names[2:]])
    line = failing(tmp_path, model, renamed)
    assert f"{given} rows have no column item; did you mean itme?" in line
    assert "column user has 90 nulls" in failing(
        tmp_path, model, support.set_column(0, "user", pa.nulls(90, pa.int64()))
    )
    wrong = support.set_column(6, "click", pa.array([7] * 90))
    assert "label column click holds 7: this model takes 0 to 1" in failing(tmp_path, model, wrong)
    assert f"{given} has 0 rows: there is no task" in failing(tmp_path, model, support.slice(0, 0))


def test_files_must_have_the_same_types(model: Path, support: pa.Table, tmp_path: Path) -> None:
    names = pa.array([str(user) for user in support["user"].to_pylist()])
    pq.write_table(support, tmp_path / "a.parquet")
    pq.write_table(support.set_column(0, "user", names), tmp_path / "b.parquet")
    result = run_gmeta("adapt", model, f"{tmp_path}/?.parquet", "--out", tmp_path / "out.parquet")
    assert result.returncode == 2
    assert f"{tmp_path}/b.parquet has columns user string, " in result.stderr
    assert "Make the files agree" in result.stderr


def adapt_and_stop(model: Path, inputs: Path, out: Path, processes: int, began: Event) -> None:
    """Adapt until the first chunk is written, and wait there for ever."""

    def tell(done: int, total: int) -> None:
        began.set()
        mp.get_context("fork").Event().wait()

    adapt_files(model, [str(inputs)], out, processes, True, tell)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_is_killed_leaves_no_output_and_no_process(
    model: Path, files: Path, tmp_path: Path, processes: int
) -> None:
    context, out = mp.get_context("fork"), tmp_path / "states.parquet"
    out.write_bytes(b"as it was")
    began = context.Event()
    killed = context.Process(target=adapt_and_stop, args=(model, files, out, processes, began))
    killed.start()
    wait_until(began.is_set, "a chunk is written")
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    assert len(children) == (processes if processes > 1 else 0)
    killed.kill()
    killed.join()
    assert out.read_bytes() == b"as it was"
    wait_until(lambda: not any(map(alive, children)), "its processes have ended")
    assert adapt_files(model, [str(files)], out, 1, True, lambda *_: None).num_tasks == TASKS
    assert {path.name for path in tmp_path.iterdir()} == {"support", "states.parquet"}


def alive(pid: str) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_dies_is_told_in_a_line(
    model: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mp.get_context("fork").Lock()

    def die_alone(*_: object) -> None:
        if not first.acquire(block=False):
            time.sleep(PATIENCE_S)
        os._exit(9)

    monkeypatch.setattr(job, "adapt_rows", die_alone)
    monkeypatch.setattr(job, "CHUNK_ROWS", 8)
    # As of a program that calls it: the other process would not end by its SIGTERM.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(GMetaError) as caught:
            adapt_files(model, [str(files)], tmp_path / "out.parquet", 2, True, lambda *_: None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert str(caught.value) == (
        "a process of gmeta adapt died, most likely since memory ran out: nothing was written. "
        "Run it again with fewer --processes"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["support"]
