"""Partitions from a topic of Kafka: each message once, whatever is killed, removed or goes on.

The broker is librdkafka's own mock cluster, which speaks the real protocol, or the one that
GMETA_KAFKA names (HOST:PORT)."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.pipeline import kafka_topic
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.kafka_topic import KafkaTopic, copy_topic
from gmeta.serving.channel.version_cache import CACHE_VARIABLE
from metaio.stream.chain import open_stream
from tests.pipeline.days import write_day, write_loop
from tests.pipeline.following import loop_of, stages_of
from tests.support.commands import gmeta
from tests.support.forked import Forked
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S

PARTITIONS = 4  # as the mock cluster makes of a topic that is asked for


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    named = os.environ.get("GMETA_KAFKA")
    if named:
        yield named
        return
    cluster = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
    broker = next(iter(cluster.list_topics(timeout=30).brokers.values()))
    yield f"{broker.host}:{broker.port}"


@pytest.fixture
def topic(servers: str, request: pytest.FixtureRequest) -> str:
    name = f"{request.node.name[:60]}.{os.getpid()}"
    client = {"bootstrap.servers": servers, "log_level": 0}
    if os.environ.get("GMETA_KAFKA"):
        admin = AdminClient(client)
        admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(timeout=30)
    Producer(client).list_topics(name, timeout=30)
    return name


def send(servers: str, topic: str, values: list[bytes | None]) -> None:
    """Each message goes to a partition in its turn."""
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % PARTITIONS)
    assert producer.flush(60) == 0


def rows_of(folder: Path) -> list[Any]:
    files = sorted(folder.glob("kafka-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def numbers(*values: int) -> list[bytes | None]:
    return [json.dumps({"number": one}).encode() for one in values]


def test_each_message_is_copied_once(servers: str, topic: str, tmp_path: Path) -> None:
    source, pattern = KafkaTopic(servers, topic), str(tmp_path / "minute=*")
    assert copy_topic(source, pattern) is None
    send(servers, topic, numbers(*range(100)))
    first = copy_topic(source, pattern)
    assert first is not None
    assert (first.folder.name, first.num_messages) == ("minute=00000001", 100)
    assert (first.folder / "_SUCCESS").exists()
    assert copy_topic(source, pattern) is None
    send(servers, topic, numbers(100))  # one partition of the topic alone
    second = copy_topic(source, pattern)
    send(servers, topic, numbers(*range(101, 130)))
    third = copy_topic(source, pattern)
    assert second is not None
    assert third is not None
    found = [row["number"] for one in (first, second, third) for row in rows_of(one.folder)]
    assert sorted(found) == list(range(130))
    # The first file of the second copy begins where that of the first ended.
    assert [path.name.split("-")[-2:] for path in second.folder.glob("*-0-*.jsonl")] == [
        [f"{25:020d}", f"{26:020d}.jsonl"]
    ]


def test_a_message_becomes_one_line_or_none(servers: str, topic: str, tmp_path: Path) -> None:
    send(
        servers,
        topic,
        [b'{\n  "number": 1\n}', None, b"", b"no\njson", b'{"text": "\xc3\xa9"}', None],
    )
    copied = copy_topic(KafkaTopic(servers, topic), str(tmp_path / "*"))
    assert copied is not None
    assert (copied.num_messages, copied.num_empty) == (3, 3)
    lines = {
        line for file in copied.folder.glob("*.jsonl") for line in file.read_bytes().splitlines()
    }
    assert lines == {b'{"number": 1}', b"no json", b'{"text": "\xc3\xa9"}'}
    # Nothing but tombstones: no file, and they are not read again.
    send(servers, topic, [None])
    empty = copy_topic(KafkaTopic(servers, topic), str(tmp_path / "*"))
    assert empty is not None
    assert not list(empty.folder.glob("kafka-*"))
    assert copy_topic(KafkaTopic(servers, topic), str(tmp_path / "*")) is None


def _copy_and_die(servers: str, topic: str, pattern: str, calls: int) -> None:
    """Copy, and be killed before a file or the folder gets its name, after so many that did."""
    rename, left = Path.rename, [calls]

    def counted(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.rename = counted  # type: ignore[assignment,method-assign]
    copy_topic(KafkaTopic(servers, topic), pattern)


def test_a_kill_loses_and_doubles_nothing(servers: str, topic: str, tmp_path: Path) -> None:
    pattern, sent = str(tmp_path / "minute=*"), 0
    for calls in range(PARTITIONS + 2):  # the last one ends by itself
        send(servers, topic, numbers(*range(sent, sent + 9)))
        sent += 9
        killed = calls <= PARTITIONS  # a name for each file, then for the folder
        code = Forked(_copy_and_die, servers, topic, pattern, calls).wait(PATIENCE_S)
        assert code == (-signal.SIGKILL if killed else 0)
    copy_topic(KafkaTopic(servers, topic), pattern)
    found = Counter(row["number"] for one in tmp_path.glob("minute=*") for row in rows_of(one))
    assert found == Counter(range(sent))
    assert not list(tmp_path.glob(".*partial"))


def test_what_cannot_be_copied_ends_with_one_line(
    servers: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = str(tmp_path / "clicks" / "minute=*")
    send(servers, topic, numbers(*range(9)))
    monkeypatch.setattr(kafka_topic, "_WAIT_S", 0.5)
    assert catch_message(
        GMetaError, copy_topic, KafkaTopic("127.0.0.1:1", topic), pattern
    ).startswith(f"the topic {topic!r} at 127.0.0.1:1 cannot be read: ")
    monkeypatch.undo()
    assert "Correct its name" in catch_message(
        UserError, copy_topic, KafkaTopic(servers, "no-such"), pattern
    )
    for wrong in ("clicks", "clicks/*/minute=*", "clicks/minute=**", "clicks/[0-9]*"):
        assert "one * in its last part" in catch_message(
            ConfigError, kafka_topic.check_pattern, wrong
        )
    properties = tmp_path / "client.properties"
    for line, said in (
        ("plugin.library.paths=evil", "cannot be set"),
        ("sasl.password", "is no key=value"),
        ("no.such.key=1", "no.such.key"),
    ):
        properties.write_text(f"# of the team\n\n{line}\n")
        source = KafkaTopic(servers, topic, properties)
        assert said in catch_message(GMetaError, copy_topic, source, pattern)
    properties.write_text("client.id = team\n")
    copied = copy_topic(KafkaTopic(servers, topic, properties), pattern)
    assert copied is not None
    assert "of the topic" in catch_message(UserError, copy_topic, KafkaTopic(servers, "b"), pattern)
    offsets = copied.folder / "_offsets.json"
    known = offsets.read_text()
    # The topic was made anew; then messages went before they were copied.
    offsets.write_text(known.replace('"0": 3', '"0": 300'))
    source = KafkaTopic(servers, topic)
    assert "made anew" in catch_message(GMetaError, copy_topic, source, pattern)
    offsets.write_text("{")
    assert "put back a copy" in catch_message(UserError, copy_topic, source, pattern)
    offsets.write_text(known)
    oldest = {0: 5, 1: 2, 2: 2, 3: 2}
    send(servers, topic, numbers(*range(9, 24)))

    def younger(consumer: Consumer, at: TopicPartition, **options: Any) -> tuple[int, int]:
        _, end = consumer.get_watermark_offsets(at, **options)
        return oldest[at.partition], end

    class Younger:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._own = Consumer(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._own, name)

        def get_watermark_offsets(self, at: TopicPartition, **options: Any) -> tuple[int, int]:
            return younger(self._own, at, **options)

    monkeypatch.setattr("confluent_kafka.Consumer", Younger)
    message = catch_message(GMetaError, copy_topic, source, pattern)
    assert "begins at offset 5, but was copied up to 3: 2 messages were deleted" in message
    skipped = copy_topic(source, pattern, skips_gone=True)
    assert skipped is not None
    assert skipped.num_messages == 15 - 2


@pytest.mark.distributed
def test_the_loop_follows_a_topic(
    servers: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    config = write_loop(tmp_path, margin=9)
    config.write_text(
        config.read_text().replace("/logs/day=*", "/copies/*")
        + f'\n[kafka]\nservers = "{servers}"\ntopic = "{topic}"\nevery_s = 3600\n'
    )
    days = [
        pq.read_table(write_day(tmp_path / "days", day) / "part-0.parquet").to_pylist()
        for day in range(2)
    ]
    stages = ["fetch", "prepare", "train", "export", "judge", "promote"]
    for number, day in enumerate(days, 1):
        send(servers, topic, [json.dumps(row).encode() for row in day])
        loop = loop_of(config)  # as started again: it looks at once
        expected = [(stage, 0 if stage == "fetch" else number) for stage in stages]
        assert stages_of(loop)[: len(stages)] == expected
        assert loop.step() is None
    stream = open_stream(str(tmp_path / "stream"))
    names = [file["name"] for file in stream.newest.report["inputs"]]
    assert len(names) == PARTITIONS
    assert all(f"copies/00000002/kafka-{topic}-" in name for name in names)
    # Without any copy left the stream says what was copied.
    for copy in (tmp_path / "copies").iterdir():
        copy.rename(tmp_path / copy.name.lstrip("."))
    assert (
        copy_topic(KafkaTopic(servers, topic), str(tmp_path / "copies/*"), str(stream.url)) is None
    )
    send(servers, topic, [json.dumps(row).encode() for row in days[1]])
    done = gmeta("fetch", servers, topic, f"{tmp_path}/copies/*", "--stream", stream.url)
    assert done.stdout.strip() == f"{tmp_path}/copies/00000003: {len(days[1])} messages"


def test_config_of_a_topic(tmp_path: Path) -> None:
    config = write_loop(tmp_path)
    text = config.read_text()
    config.write_text(text + '[kafka]\nservers = "localhost:9092"\n')
    assert "kafka.topic is empty" in catch_message(ConfigError, load_follow_config, config)
    config.write_text(
        text.replace("logs/day=*", "logs/*/day=*")
        + '[kafka]\nservers = "localhost:9092"\ntopic = "clicks"\n'
    )
    assert "one * in its last part" in catch_message(ConfigError, load_follow_config, config)
