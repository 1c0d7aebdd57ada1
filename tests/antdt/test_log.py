"""The service's log: one event a line, whole, with its fields; decisions go on in their file."""

import json
import logging
from pathlib import Path

import pytest

from gmeta.access.log import LOGGER_NAME, DecisionLog, JsonFormatter, configure_logging, event


def record_of(message: str, **more: object) -> logging.LogRecord:
    made = logging.LogRecord(LOGGER_NAME, logging.WARNING, __file__, 1, message, (), None)
    made.created, made.msecs = 86_400.25, 250.0  # a quarter second into the second of January 1970
    vars(made).update(more)
    return made


def test_an_event_is_one_line_with_its_time_level_and_fields() -> None:
    fields = {"worker_id": "grün\n2", "token": 7}
    line = JsonFormatter().format(record_of("lease_expired", fields=fields))
    assert "\n" not in line
    assert "grün" in line  # people read it too
    assert json.loads(line) == {
        "time": "1970-01-02T00:00:00.250Z", "level": "warning", "event": "lease_expired", **fields,
    }  # fmt: skip


def test_an_error_brings_its_traceback_on_the_same_line() -> None:
    try:
        raise ValueError("page 3\nis gone")
    except ValueError as error:
        line = JsonFormatter().format(
            record_of("view_failed", exc_info=(type(error), error, error.__traceback__))
        )
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: page 3\nis gone")


def test_events_below_the_level_are_left_out_and_each_is_written_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        configure_logging("warning")
    event(logging.INFO, "Register", worker_id="a")
    event(logging.ERROR, "writer_ended", store="memory:")
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["event"], told["level"], told["store"]) == ("writer_ended", "error", "memory:")
    assert caplog.records == []  # a root logger would print each once more, in its own form


def test_decisions_go_on_behind_what_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "decisions.jsonl"
    for line in ("one", "two"):  # a service, and the one after it
        DecisionLog(path).write(line)
    assert path.read_text() == "one\ntwo\n"
