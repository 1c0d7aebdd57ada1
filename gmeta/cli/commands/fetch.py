"""`gmeta fetch`: copies what is new in a Kafka topic into the next partition of a log."""

from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands.console import make_console
from gmeta.pipeline.kafka_topic import NOTHING_NEW, KafkaTopic, copy_topic
from metaio.quantities import format_count


def fetch(
    servers: Annotated[str, typer.Argument(help="HOST:PORT of brokers, separated by commas")],
    topic: Annotated[str, typer.Argument(help="topic of JSON messages, a row each")],
    partitions: Annotated[
        str, typer.Argument(help="folders of the copies, with * for a copy's number")
    ],
    properties: Annotated[
        Path | None,
        typer.Option(help="file of lines key=value for librdkafka, such as credentials"),
    ] = None,
    stream: Annotated[
        str, typer.Option(help="stream of which nothing is copied again, where copies are removed")
    ] = "",
    skip_gone: Annotated[
        bool, typer.Option("--skip-gone", help="go on without messages that were deleted before")
    ] = False,
) -> None:
    """Copy what is new in a Kafka topic into the next partition of a log.

    gmeta fetch broker:9092 clicks 'clicks/minute=*'

    Each message is copied once, wherever the command is killed: the newest copy says where the next
    begins, and nothing is committed to Kafka. `gmeta follow` does it with a section \\[kafka]."""
    copied = copy_topic(KafkaTopic(servers, topic, properties), partitions, stream, skip_gone)
    if copied is None:
        make_console().print(NOTHING_NEW)
        return
    without = f", {copied.num_empty:,} without a value left out" if copied.num_empty else ""
    make_console().print(
        f"{copied.folder}: {format_count(copied.num_messages, 'message')}{without}"
    )
