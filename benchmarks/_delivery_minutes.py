"""What a minute of a Kafka topic costs: the part of delivery.py that follows messages."""

import json
import statistics
import sys
import time
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from _common import REPOSITORY

from gmeta.errors import GMetaError
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.stage_process import last_line, run_stage
from metaio.recipes.synthetic_days import DaysConfig, write_days

MINUTE_S = 60.0
MARGIN = 0.5  # what is promoted is no matter here, as long as the loop goes on


def followed_minutes(root: Path, minutes: int, users: int) -> dict[str, Any]:
    """Return the seconds from a minute's messages to its version over 60, the median of the second
    half of the minutes; rows a minute; and bytes of the last delta over those of the full model.

    The broker is librdkafka's mock cluster, which speaks the real protocol."""
    from confluent_kafka import Producer

    root.mkdir()
    write_days(str(root / "logs"), DaysConfig(minutes, users))
    broker = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
    address = next(iter(broker.list_topics(timeout=30).brokers.values()))
    config = root / "stream.toml"
    config.write_text(
        f'[follow]\ninputs = "{root}/copies/*"\nschema = "{root}/logs/schema.toml"\n'
        f'stream = "{root}/stream"\ntrain = "{REPOSITORY}/examples/stream/train.toml"\n'
        f'runs = "{root}/runs"\nchannel = "{root}/channel"\nfrozen = false\nkeep = 4\n'
        f'[kafka]\nservers = "{address.host}:{address.port}"\ntopic = "clicks"\nevery_s = 1\n'
        f"[judge]\nmargin = {MARGIN}\n"
    )
    loop = Pipeline(load_follow_config(config), run_stage, last_line)
    took_s, rows = [], []
    for file in sorted((root / "logs").glob("day=*/clicks.parquet")):
        table = pq.read_table(file).to_pylist()
        for row in table:
            broker.produce("clicks", json.dumps(row, default=_format_time).encode())
        broker.flush(60)
        # The loop looks for messages once a second here, and once a minute by default.
        time.sleep(1.0)
        began_s = time.perf_counter()
        try:
            while (done := loop.step()) is not None and done.stage != "promote":
                pass
        except GMetaError as error:
            sys.exit(f"the loop: {error}")
        took_s.append(time.perf_counter() - began_s)
        rows.append(len(table))
    version = loop.channel.version(loop.channel.require_current().number)
    return {
        "minute_cost_ratio": round(statistics.median(took_s[minutes // 2 :]) / MINUTE_S, 3),
        "minute_rows": round(statistics.mean(rows)),
        "minute_versions": version.number,
        "minute_delta_share": round(version.num_bytes / version.full_bytes, 3),
    }


def _format_time(value: Any) -> str:
    if not isinstance(value, datetime | date):
        raise TypeError(f"{value!r} is no time")
    return value.isoformat()
