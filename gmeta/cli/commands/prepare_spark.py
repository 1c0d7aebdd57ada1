"""`gmeta prepare --spark`: Spark reads and deals the tables."""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmeta.errors import UserError
from metaio.prepare.engines.spark import prepare_with_spark
from metaio.prepare.engines.spark_batches import translate_failures
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def prepare_on_spark(inputs: list[str], out: str, schema: Schema, options: PrepareOptions) -> None:
    """Write a dataset at `out` from the Parquet tables at `inputs`."""
    # The cluster is that of Spark's own configuration (SPARK_CONF_DIR, PYSPARK_SUBMIT_ARGS).
    with spark_session(inputs, out) as session:
        prepare_with_spark(_read_frame(session, inputs, schema), out, schema, options)


def refuse_transform(path: Path, schema: Schema) -> None:
    """Raise UserError for a schema with [transform], which Spark cannot run."""
    if schema.transform is not None:
        raise UserError(
            f"{path} has [transform], which runs on one machine. Leave --spark out, or transform "
            "the rows in Spark before"
        )


@contextmanager
def spark_session(inputs: list[str], out: str) -> Iterator["SparkSession"]:
    """Yield a Spark session that makes `out` of these tables."""
    for path in inputs:
        # Spark guesses the types of text columns by other rules than one machine does.
        if re.search(r"\.(csv|tsv|json|jsonl|ndjson|zip)(\.gz)?$", path.lower()):
            raise UserError(
                f"--spark was given {path}; it reads Parquet tables. Convert it, or leave out "
                "--spark"
            )
    # After the check of the inputs: they are wrong whether or not pyspark is installed.
    if importlib.util.find_spec("pyspark") is None:
        raise UserError("--spark needs pyspark. Run: pip install 'gmeta[spark]'")
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        session = SparkSession.builder.appName(f"gmeta prepare {out}").getOrCreate()
        # As on one machine: a table may have columns that differ in case, if none of them is read.
        session.conf.set("spark.sql.caseSensitive", "true")
    except PySparkRuntimeError as error:
        if error.getErrorClass() != "JAVA_GATEWAY_EXITED":
            raise
        raise UserError(
            "Spark's Java process did not start; what it said stands above. Install Java 17 or "
            "21, or correct JAVA_HOME"
        ) from error
    try:
        yield session
    finally:
        # After an error too: on a cluster the session would keep its executors.
        session.stop()


@translate_failures()
def _read_frame(session: "SparkSession", inputs: list[str], schema: Schema) -> Any:
    from pyspark.errors import AnalysisException

    # Hadoop knows S3 by this name only; the dataset is written by fsspec, which knows both.
    paths = [f"s3a{path[2:]}" if path.startswith("s3://") else path for path in inputs]
    try:
        # Without the columns of folders such as day=1, whose values would replace those of the
        # files.
        frame = session.read.option("recursiveFileLookup", "true").parquet(*paths)
        # The schema may name a column of the folders: then the files are read with them.
        lacks = set(schema.columns) - set(frame.columns)
        return session.read.parquet(*paths) if lacks else frame
    except AnalysisException as error:
        raise UserError(
            f"Spark cannot read {', '.join(paths)}: {str(error).splitlines()[0]} Correct the path; "
            "all executors must reach it"
        ) from error
