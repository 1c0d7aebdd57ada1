"""Real logs as streams: MovieLens-100k and Amazon by time, as benchmarks/streams.py cuts them."""

import itertools
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import streams

from metaio.format.dataset import Dataset
from metaio.stream.chain import open_stream
from tests.metaio.recipes.test_movielens import SHARED
from tests.support.commands import succeed

ROWS = 6_000


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["ml-100k", "amazon"])
def test_a_real_log_has_the_same_ids_however_it_is_cut_and_its_gate_is_never_trained(
    name: str, tmp_path: Path
) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"{name} does not stand beside the repository")
    log = streams.LOGS[name](SHARED / name)
    log = streams.Log(log.table.slice(0, ROWS), log.singles, log.multis)
    folders = streams.write_parts(log, tmp_path, 4)
    parts = [pq.read_table(folder / "log.parquet") for folder in folders]
    assert sum(map(len, parts)) == ROWS
    # Nothing of a part is as old as what is newest in the part before it.
    ends = [(part["time"].to_numpy().min(), part["time"].to_numpy().max()) for part in parts]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))
    vocabularies = []
    for cut, groups in (("often", [[one] for one in folders]), ("once", [folders])):
        stream = tmp_path / cut
        for group in groups:
            files = [folder / "log.parquet" for folder in group]
            arguments = ["--schema", tmp_path / "schema.toml", "--extend", stream, *files]
            succeed("prepare", *arguments)
        opened = open_stream(str(stream))
        vocabularies.append(values_of(opened.dataset(opened.newest.number)))
        trained = [tasks_of(opened.dataset(number), "train") for number in opened.numbers]
        gate = [tasks_of(opened.dataset(number), "gate") for number in opened.numbers]
        assert not set.union(*trained) & set.union(*gate)
        assert min(map(len, gate)) > 0
    assert vocabularies[0] == vocabularies[1]
    assert len(vocabularies[0]["item"]) > 100


def test_one_increment_has_no_standard_error() -> None:
    rows = [{"continued": 0.75, "retrained": None}, {"continued": 0.75, "retrained": 0.5}]
    assert streams._difference(rows, "retrained") == {"mean": 0.25, "standard_error": None}


def test_models_are_compared_on_the_increments_that_all_have_a_score_of() -> None:
    none: dict[str, float | None] = {"continued": None, "frozen": 0.9, "retrained": 0.9, "rows": 9}
    rows = [
        {"continued": 0.9, "frozen": 0.1, "retrained": None, "rows": 100},
        {"continued": 0.7, "frozen": 0.5, "retrained": 0.6, "rows": 10},
        {"continued": 0.4, "frozen": 0.2, "retrained": 0.3, "rows": 20},
        none,
    ]
    means = {key: streams._mean(rows, key) for key in streams.MODELS}
    assert means == pytest.approx({"continued": 0.5, "frozen": 0.3, "retrained": 0.4})
    assert streams._difference(rows, "retrained")["mean"] == pytest.approx(0.1)
    # Clicks of one class have no AUC, and a benchmark that met them ends with its line.
    assert streams._mean([none], "frozen") is None
    assert streams._difference([none], "frozen") == {"mean": None, "standard_error": None}


def values_of(dataset: Dataset) -> dict[str, list[object]]:
    """The values of every vocabulary, by their rows."""
    return {
        table: pq.read_table(f"{dataset.url}/vocabulary/{table}.parquet")["value"].to_pylist()
        for table in dataset.manifest.vocabularies
    }


def tasks_of(dataset: Dataset, split: str) -> set[int]:
    """The tasks of a split."""
    blocks = (dataset.read_block(split, i) for i in range(dataset.split(split).num_blocks))
    return {task for block in blocks for task in block.task_T.tolist()}
