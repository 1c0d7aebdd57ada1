"""`gmeta prepare --extend STREAM --spark` on a standalone cluster of two workers."""

import re
import shutil
from pathlib import Path

import pytest

from metaio.prepare.schema.schema_file import load_schema
from metaio.stream.extend import extend
from tests.metaio.prepare.test_spark_command import cluster, needs_spark, run
from tests.metaio.stream.logs import OPTIONS
from tests.metaio.stream.test_spark import files, written

SCHEMA = """
task = { column = "user" }
label = { column = "click" }
time = { column = "time" }
row_id = { column = "row" }
single = [{ column = "item", vocabulary = 2 }, { column = "age", hash = 20 }]
dense = [{ column = "price", standardise = true }]
episodes = { by = "last", query_rows = 2, min_rows = 3, max_rows = 50 }
stream = { gate = 0.25, late = 3600 }
"""


@needs_spark
@pytest.mark.timeout(1800)
def test_a_cluster_of_two_workers_extends_a_stream_of_one_machine(tmp_path: Path) -> None:
    schema, one, many = tmp_path / "schema.toml", tmp_path / "one", tmp_path / "many"
    schema.write_text(SCHEMA)
    first, second = written(tmp_path / "logs", 0), written(tmp_path / "logs", 1)
    extend(first, str(one), load_schema(schema), OPTIONS)
    shutil.copytree(one, many)
    extend(second, str(one), None, OPTIONS)
    with cluster(tmp_path) as url:
        conf = f"spark.master {url}\nspark.driver.host 127.0.0.1\nspark.executor.memory 600m\n"
        conf += "spark.ui.enabled false\nspark.sql.shuffle.partitions 4\n"
        size = ["--block-rows", str(OPTIONS.block_rows)]
        done = run(tmp_path, "--extend", str(many), "--spark", *size, *second, conf=conf)
    assert done.returncode == 0, done.stderr
    assert "increment 2: " in done.stderr
    assert files(many) == files(one)
    said = (tmp_path / "spark0.log").read_text()
    workers = re.findall(r"Launching executor \S+ on worker (\S+)", said)
    assert len(set(workers)) == 2, said[-2000:]
