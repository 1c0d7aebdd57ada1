"""`gmeta prepare --spark` on threads and on a cluster: the files of one machine, to the byte."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gmeta.cli.commands.prepare_spark import prepare_on_spark
from gmeta.errors import UserError
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import load_schema, parse_schema
from tests.antdt.faults.service_process import free_port
from tests.metaio.prepare.test_local import raw_table
from tests.support.commands import environment
from tests.support.waiting import PATIENCE_S, wait_until

needs_spark = pytest.mark.skipif(
    importlib.util.find_spec("pyspark") is None or shutil.which("java") is None,
    reason="needs the extra spark, and Java 17 or 21 on PATH",
)
SCHEMA = """
task = { column = "user" }
label = { column = "clicked" }
time = { column = "ts" }
single = [{ column = "item", vocabulary = 1 }, { column = "shop", hash = 64 }]
dense = [{ column = "price" }]
episodes = { by = "last", query_rows = 3, min_rows = 5 }
splits = { shares = { train = 0.8, valid = 0.2 } }
"""


def run(folder: Path, *arguments: str, conf: str = "") -> subprocess.CompletedProcess[str]:
    """gmeta with `conf` as the lines of spark-defaults.conf, the way that the manifests give it."""
    (folder / "spark-defaults.conf").write_text(conf)
    root = str(Path(__file__).parents[3])
    return subprocess.run(
        [sys.executable, "-m", "gmeta", "prepare", *arguments],
        env={
            **environment(),
            "SPARK_CONF_DIR": str(folder),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",  # the machine's name may have no address
            "PYTHONPATH": root,
        },
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """schema.toml, raw.parquet, and what one machine makes of them in `one`."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    pq.write_table(raw_table(6_000), tmp_path / "raw.parquet", row_group_size=900)
    options = PrepareOptions(threads=1, block_rows=400)
    schema = load_schema(tmp_path / "schema.toml")
    prepare([str(tmp_path / "raw.parquet")], str(tmp_path / "one"), schema, options)
    return tmp_path


def prepare_many(logs: Path, conf: str) -> subprocess.CompletedProcess[str]:
    schema = ["--spark", "--schema", str(logs / "schema.toml"), "--block-rows", "400"]
    return run(logs, *schema, f"file://{logs}/raw.parquet", str(logs / "many"), conf=conf)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A Spark master and two workers, a process each; the master's URL."""
    home = Path(str(importlib.util.find_spec("pyspark").origin)).parent  # type: ignore[union-attr]
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    at = ["--host", "127.0.0.1", "--webui-port", "0"]
    commands = [[f"{deploy}.master.Master", *at, "--port", str(port)]]
    commands += [
        [f"{deploy}.worker.Worker", url, *at, "-c", "1", "-m", "700m", "-d", str(folder / str(i))]
        for i in range(2)
    ]
    with ExitStack() as stack:
        for i, command in enumerate(commands):
            log = stack.enter_context((folder / f"spark{i}.log").open("w"))
            process = subprocess.Popen(
                [home / "bin/spark-class", *command],
                env={
                    **environment(),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "PYTHONPATH": str(Path(__file__).parents[3]),
                },
                stdout=log,
                stderr=log,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        log = folder / "spark0.log"
        wait_until(
            lambda: log.read_text().count("Registering worker") == 2, f"two workers in {log}"
        )
        yield url


@needs_spark
@pytest.mark.timeout(1800)
def test_threads_and_a_cluster_of_two_workers_make_the_files_of_one_machine(logs: Path) -> None:
    common = "spark.ui.enabled false\nspark.sql.shuffle.partitions 4\n"
    done = prepare_many(logs, f"spark.master local[2]\n{common}")
    assert done.returncode == 0, done.stderr
    assert "prepared:" in done.stderr
    assert files(logs / "many") == files(logs / "one")
    shutil.rmtree(logs / "many")
    with cluster(logs) as url:
        conf = f"spark.master {url}\nspark.driver.host 127.0.0.1\nspark.executor.memory 600m\n"
        done = prepare_many(logs, conf + common)
    assert done.returncode == 0, done.stderr
    assert files(logs / "many") == files(logs / "one")
    said = (logs / "spark0.log").read_text()
    workers = re.findall(r"Launching executor \S+ on worker (\S+)", said)
    assert len(set(workers)) == 2, said[-2000:]


@needs_spark
def test_an_input_that_is_cut_short_is_one_line(logs: Path) -> None:
    raw = logs / "raw.parquet"
    raw.write_bytes(raw.read_bytes()[:-100])
    done = prepare_many(logs, "spark.master local[1]\nspark.ui.enabled false\n")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: Spark failed: ")
    assert "Traceback" not in done.stderr
    assert not (logs / "many").exists()


@needs_spark
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Item", "error: the DataFrame has columns Item and item, which differ only in case. "
         "Rename or remove one"),
        ("Other", ""),
    ],
)  # fmt: skip
def test_columns_that_differ_in_case_are_refused_if_they_are_read(
    logs: Path, name: str, told: str
) -> None:
    table = pq.read_table(logs / "raw.parquet")
    for column in (name, "other"):
        table = table.append_column(column, table["item"])
    pq.write_table(table, logs / "raw.parquet", row_group_size=900)
    done = prepare_many(logs, "spark.master local[1]\nspark.ui.enabled false\n")
    assert done.returncode == (2 if told else 0), done.stderr
    assert told in done.stderr.splitlines() or not told
    assert told or files(logs / "many") == files(logs / "one")


def test_what_spark_is_not_for_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run(tmp_path, "--spark", "--recipe", "synthetic", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (
        2,
        "error: --spark has no effect with --recipe synthetic: it is for --schema --spark and "
        "--extend --spark. Leave it out\n",
    )
    (tmp_path / "schema.toml").write_text(SCHEMA)
    paths = [str(tmp_path / "logs.csv"), str(tmp_path / "out")]
    done = run(tmp_path, "--spark", "--schema", str(tmp_path / "schema.toml"), *paths)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: --spark was given {tmp_path}/logs.csv; it reads Parquet tables. Convert it, or "
        "leave out --spark\n",
    )


def test_spark_that_is_not_installed_is_said_how_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = parse_schema(tomllib.loads(SCHEMA))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        prepare_on_spark(["logs.parquet"], "out", schema, PrepareOptions())
    assert str(caught.value) == "--spark needs pyspark. Run: pip install 'gmeta[spark]'"
