"""A column joins the log that is followed: the schema is edited, and the loop goes on."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gmeta
from gmeta.errors import GMetaError
from gmeta.runs.run_folder import RunFolder
from gmeta.serving.channel.channel import Channel
from metaio.stream.chain import open_stream
from tests.pipeline.days import write_day, write_loop
from tests.pipeline.following import loop_of, stages_of

JOINING = """
[[single]]
column = "shop"
vocabulary = 1
null = "unknown"
[[dense]]
column = "age"
fill = 0.5
"""


def add_columns(folder: Path) -> None:
    """Add a shop and an age to the clicks of a day."""
    path = folder / "part-0.parquet"
    table = pq.ParquetFile(path).read()
    rng = np.random.default_rng(len(table))
    table = table.append_column("shop", pa.array([f"s{n}" for n in rng.integers(0, 9, len(table))]))
    pq.write_table(table.append_column("age", pa.array(rng.random(len(table)))), path)


@pytest.mark.distributed
def test_the_loop_goes_on_when_a_column_joins(tmp_path: Path) -> None:
    config, logs = write_loop(tmp_path, margin=9, pool=7), tmp_path / "logs"
    schema, channel = tmp_path / "schema.toml", Channel(tmp_path / "channel")
    write_day(logs, 0)
    loop = loop_of(config)
    stages_of(loop)
    add_columns(write_day(logs, 1))
    before = schema.read_text()
    # What changes the meaning of earlier rows is refused, and nothing is prepared.
    schema.write_text(before.replace("vocabulary = 2", "vocabulary = 3"))
    with pytest.raises(GMetaError, match="the schema differs from that of the stream"):
        loop.step()
    schema.write_text(before.replace("[episodes]", f"{JOINING}[episodes]"))
    assert stages_of(loop) == [
        *((stage, 2) for stage in ("prepare", "train", "export", "judge", "promote", "score"))
    ]
    joined = open_stream(str(tmp_path / "stream")).record(2).report["joined_columns"]
    assert joined == ["shop", "age"]
    verdict = json.loads((tmp_path / "runs/000002/verdict.json").read_text())
    assert verdict["champion_version"] == 1
    assert verdict["champion"]["logloss"] > 0
    log = (tmp_path / "runs/000002/train.log").read_text()
    assert "shop, age joined, at weight 0" in log
    # A table of its own joined, so that the version is whole; the next one may be a delta.
    assert channel.version(2).delta is None
    write_day(logs, 2)
    add_columns(logs / "day=002")
    stages_of(loop)
    assert channel.require_current().number == 3
    with gmeta.follow(channel.root, every_s=0) as follower:
        rows = pq.ParquetFile(logs / "day=002/part-0.parquet").read().sort_by("user")
        support, query = rows.slice(0, 4), rows.slice(4, 2)
        adapted = follower.model.adapt(support)
        other = query.set_column(query.column_names.index("age"), "age", pa.array([0.0, 9.0]))
        assert (adapted.predict(query) != adapted.predict(other)).all()
    # After a rollback to the model that does not know them the inputs join again.
    channel.rollback(1)
    add_columns(write_day(logs, 3))
    stages_of(loop)
    run = RunFolder(tmp_path / "runs/000004/run").read_config().run
    assert list(run.skip_increments) == [2, 3]
    assert "shop, age joined, at weight 0" in (tmp_path / "runs/000004/train.log").read_text()
    assert channel.require_current().number == 4
