"""Copies what is new in a Kafka topic into a partition of a log, each message exactly once.

Nothing is committed to Kafka. The files of a copy are named by the offsets that they hold, which
the manifest of an increment repeats; the next copy begins where they end, whatever was killed."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.pipeline.log_partitions import SUCCESS
from gmeta.platform.files.local_paths import check_local
from gmeta.platform.files.storage_errors import translate_storage_errors
from metaio.format.atomic_folder import lock_writer, open_atomic_folder
from metaio.stream.chain import is_stream, open_stream

NOTHING_NEW = "nothing new"
# Of a copy: where the next one begins. The name begins with _, so it is no file of the log.
OFFSETS_FILE = "_offsets.json"
_COPY = re.compile(r"(\d{8})/kafka-(.+)-(\d+)-(\d{20})-(\d{20})\.jsonl$")
_WAIT_S = 30.0  # for brokers to say something
# Keys of librdkafka that this module relies on, and one that would load a program.
_OWN_PROPERTIES = {
    "bootstrap.servers", "group.id", "enable.auto.commit", "enable.partition.eof",
    "auto.offset.reset", "plugin.library.paths",
}  # fmt: skip


@dataclass(frozen=True)
class KafkaTopic:
    """A topic of Kafka, and how its brokers are reached."""

    servers: str
    topic: str
    properties: Path | None = None


@dataclass(frozen=True)
class TopicCopy:
    """A partition of a log that holds messages of a topic."""

    folder: Path
    num_messages: int
    num_empty: int  # without a value, such as tombstones: they are no rows


@dataclass(frozen=True)
class _Span:
    """Offsets of one partition of a topic: the first that is new, and the end."""

    first: int
    end: int


def check_pattern(pattern: str) -> None:
    """Raise UserError unless a pattern of a log names one local folder for each copy."""
    check_local("follow.inputs", pattern)
    parent, name = str(Path(pattern).parent), Path(pattern).name
    if name.count("*") != 1 or re.search(r"[*?[]", parent) or re.search(r"[?[]", name):
        raise ConfigError(
            f"{pattern!r} names no folders for copies of a topic: one * in its last part is "
            "needed, for the copy's number. Write e.g. clicks/minute=*"
        )


def copy_topic(
    source: KafkaTopic, pattern: str, stream: str = "", skips_gone: bool = False
) -> TopicCopy | None:
    """Copy all new messages of a topic to the next folder that `pattern` names.

    Returns None if there are none. `stream`: also what its increments were made of is not copied
    again. Raises GMetaError where messages were deleted before they were copied, unless
    `skips_gone`."""
    check_pattern(pattern)
    place = Path(pattern)
    place.parent.mkdir(parents=True, exist_ok=True)
    with lock_writer(place.parent / ".fetch.lock", str(place.parent), "Wait for it"):
        number, positions = _find_positions(place, source.topic, stream)
        with _open_consumer(source) as consumer:
            spans = _find_new(consumer, source, positions, skips_gone)
            if not spans:
                return None
            target = _name_copy(place, number + 1)
            with open_atomic_folder(target) as partial:
                counts, ends = _copy_spans(consumer, source, spans, partial)
                offsets = {str(one): end for one, end in (positions | ends).items()}
                content = {"topic": source.topic, "next": offsets}
                (partial / OFFSETS_FILE).write_text(json.dumps(content) + "\n")
                # Closes the partition for whoever follows the log.
                (partial / SUCCESS).touch()
    return TopicCopy(target, *counts)


def _name_copy(place: Path, number: int) -> Path:
    """Return the folder of a copy by its number."""
    return place.with_name(place.name.replace("*", f"{number:08d}"))


def _find_positions(place: Path, topic: str, stream: str) -> tuple[int, dict[int, int]]:
    """Return the number of the newest copy, and the next offset of each partition of the topic."""
    head, tail = place.name.split("*")
    numbers = [
        int(path.name[len(head) : len(path.name) - len(tail)])
        for path in place.parent.glob(f"{head}{'[0-9]' * 8}{tail}")
    ]
    newest = max(numbers, default=0)
    positions = _read_offsets(_name_copy(place, newest), topic) if newest else {}
    if stream and is_stream(stream):
        opened = open_stream(stream)
        # Copies may be removed: the increments that were made of them say what they held.
        for increment in reversed(opened.numbers):
            names = [str(file["name"]) for file in opened.record(increment).report["inputs"]]
            held = _read_names(names, head, tail, topic)
            if held and max(held) <= newest:
                break
            for of_copy in held.values():
                for partition, end in of_copy.items():
                    positions[partition] = max(positions.get(partition, 0), end)
            numbers += held
    return max(numbers, default=0), positions


def _read_offsets(copy: Path, topic: str) -> dict[int, int]:
    """Return where the copy after this one begins, by partition of the topic."""
    path = copy / OFFSETS_FILE
    try:
        content = json.loads(path.read_text())
        positions = {int(one): int(offset) for one, offset in content["next"].items()}
        copied = str(content["topic"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read: {error!r}. It says where the next copy begins: put back a "
            "copy of that folder, or remove the folder if no increment was made of it"
        ) from error
    if copied != topic:
        raise UserError(
            f"{copy} is a copy of the topic {copied!r}, not of {topic!r}. Copy another "
            "topic to another place, and follow it as another stream"
        )
    return positions


def _read_names(
    names: Iterable[str], head: str, tail: str, topic: str
) -> dict[int, dict[int, int]]:
    """Return the next offset by partition, by copy, that names of copied files say."""
    held: dict[int, dict[int, int]] = {}
    for name in names:
        *_, folder, file = ("", *name.split("/"))
        plain = f"{folder.removeprefix(head).removesuffix(tail)}/{file}"
        found = _COPY.match(plain)
        if found and found[2] == topic:
            held.setdefault(int(found[1]), {})[int(found[3])] = int(found[5])
    return held


@contextmanager
def _open_consumer(source: KafkaTopic) -> Iterator[Any]:
    try:
        import confluent_kafka
    except ImportError as error:
        raise UserError(
            f"the topic {source.topic!r} needs the extra: pip install 'gmeta[kafka]' "
            "(confluent-kafka is not installed)"
        ) from error
    settings = {
        # A reader of transactions sees none that was aborted, unless the properties say otherwise.
        "isolation.level": "read_committed",
        **_read_properties(source.properties),
        "bootstrap.servers": source.servers,
        # The client asks for a group's name; none is joined.
        "group.id": "gmeta-fetch",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        # Its own lines about each broker would stand below the one line that says what is wrong.
        "log_level": 0,
    }
    what = f"the topic {source.topic!r} at {source.servers} cannot be read"
    remedy = "Look at the address, the network, the topic's name and the credentials"
    with translate_storage_errors(what, remedy), ExitStack() as stack:
        consumer = confluent_kafka.Consumer(settings, error_cb=lambda _: None)
        stack.callback(consumer.close)
        yield consumer


def _read_properties(path: Path | None) -> dict[str, str]:
    """Return the keys of a file of lines key=value, as Kafka's own clients read."""
    if path is None:
        return {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"kafka.properties = {str(path)!r} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, value = line.partition("=")
        # Not the line itself: it may hold a password.
        if not sign:
            raise UserError(f"{path}, line {number} is no key=value. Correct it")
        if name.strip() in _OWN_PROPERTIES:
            raise UserError(f"{path}, line {number}: {name.strip()} cannot be set. Remove the line")
        found[name.strip()] = value.strip()
    return found


def _find_new(
    consumer: Any, source: KafkaTopic, positions: Mapping[int, int], skips_gone: bool
) -> dict[int, _Span]:
    """Return what is new in each partition of the topic."""
    from confluent_kafka import TopicPartition

    described = consumer.list_topics(source.topic, timeout=_WAIT_S).topics[source.topic]
    if described.error is not None:
        raise UserError(
            f"the topic {source.topic!r} at {source.servers} cannot be read: "
            f"{described.error.str()}. Correct its name, or ask for access"
        )
    spans = {}
    for partition in sorted(described.partitions):
        at = TopicPartition(source.topic, partition)
        oldest, end = consumer.get_watermark_offsets(at, timeout=_WAIT_S)
        first = positions.get(partition, oldest)
        name = f"partition {partition} of the topic {source.topic!r}"
        if first > end:
            raise GMetaError(
                f"{name} ends at offset {end}, but was copied up to {first}: the topic was made "
                "anew. Follow it as another stream, with copies in another place"
            )
        if first < oldest and not skips_gone:
            raise GMetaError(
                f"{name} begins at offset {oldest}, but was copied up to {first}: "
                f"{oldest - first:,} messages were deleted before. Raise the topic's retention; "
                "to go on without them run gmeta fetch --skip-gone once"
            )
        first = max(first, oldest)
        if first < end:
            spans[partition] = _Span(first, end)
    return spans


def _copy_spans(
    consumer: Any, source: KafkaTopic, spans: Mapping[int, _Span], folder: Path
) -> tuple[tuple[int, int], dict[int, int]]:
    """Write a file for each partition of the topic; return counts (messages, those without a
    value) and the next offsets. What comes meanwhile is left for the next copy."""
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    topic, num_messages, num_empty = source.topic, 0, 0
    consumer.assign([TopicPartition(topic, one, span.first) for one, span in spans.items()])
    ends: dict[int, int] = {}
    with ExitStack() as stack:
        files: dict[int, BinaryIO] = {
            one: stack.enter_context((folder / f"{one}.partial").open("wb")) for one in spans
        }
        while len(ends) < len(spans):
            # Not `consume`, which waits until a batch is full. The client reads ahead by itself.
            message = consumer.poll(_WAIT_S)
            if message is None:
                raise GMetaError(f"no message came within {_WAIT_S:.0f} s")
            partition, error = message.partition(), message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            if partition in ends:
                continue
            # Offsets have gaps where transactions end: the last one may never come.
            if error is not None or message.offset() >= spans[partition].end:
                ends[partition] = message.offset()
                consumer.pause([TopicPartition(topic, partition)])
            elif value := message.value():
                num_messages += 1
                files[partition].write(_format_line(value))
            else:
                num_empty += 1
    for partition, span in spans.items():
        name = f"kafka-{topic}-{partition}-{span.first:020d}-{ends[partition]:020d}.jsonl"
        written = folder / f"{partition}.partial"
        # Messages without a value alone: an empty file would be held for the next increment.
        if written.stat().st_size:
            written.rename(folder / name)
        else:
            written.unlink()
    return (num_messages, num_empty), ends


def _format_line(value: bytes) -> bytes:
    """Return a message as one line; one that is no JSON is left for `prepare` to set aside."""
    if b"\n" not in value and b"\r" not in value:
        return value + b"\n"
    try:
        return json.dumps(json.loads(value)).encode() + b"\n"
    except ValueError:
        return value.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"
