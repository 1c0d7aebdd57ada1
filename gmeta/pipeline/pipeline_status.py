"""The state of a loop: how fresh the served model is, what waits, what alarms."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gmeta.pipeline.outcome_reader import read_scores
from gmeta.runs.run_folder import PREQUENTIAL_FILE
from gmeta.serving.channel.channel import CurrentVersion
from metaio.quantities import format_count, format_duration
from metaio.stream.chain import format_event_time, list_increment_numbers, open_stream

if TYPE_CHECKING:
    from gmeta.pipeline.pipeline import Pipeline

# A window that begins so far ahead of now is wrong; so is one behind so many late partitions.
_AHEAD_S, _MOST_LATE = 2 * 86_400, 3
_LOOKED_AT = 3  # increments, for scores of the newest


@dataclass(frozen=True)
class PipelineStatus:
    """What a loop knows between two stages; times are seconds since 1970."""

    prepared: int | None = None
    # The newest increment that the served model was trained on, and the end of its window.
    served_increment: int | None = None
    event_end_s: float | None = None
    current: CurrentVersion | None = None
    waiting: int = 0
    held: int = 0
    refused: int = 0
    # Files of the quarantine, and why.
    refused_files: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    # Why nothing that comes will be in time; "" if it may be.
    stuck: str = ""
    newest_alarms: tuple[str, ...] = ()
    fresh_s: float = 0.0
    rows: int | None = None  # of the newest increment, to train on
    # Of the newest increments that have them: scores of the model before it was trained on these
    # labels, and the candidate's mean prediction over the mean label.
    forecast: Mapping[str, float] = field(default_factory=dict)
    calibration: float | None = None

    @property
    def quarantined(self) -> int:
        """Return how many files were refused for what they hold."""
        return len(self.refused_files)

    def event_age_s(self) -> float | None:
        """Return the seconds since the newest event that the served model knows: its freshness."""
        return None if self.event_end_s is None else max(0.0, time.time() - self.event_end_s)

    def served_age_s(self) -> float | None:
        """Return the seconds since the served version was promoted."""
        return None if self.current is None else max(0.0, time.time() - self.current.since_s)

    def alarms(self) -> list[str]:
        """Return what a person should look at, a line each."""
        alarm_lines = [f"the next stage fails: {self.failure}"] if self.failure else []
        alarm_lines += [self.stuck] if self.stuck else []
        age_s = self.event_age_s()
        if self.fresh_s and age_s is not None and age_s > self.fresh_s:
            alarm_lines.append(
                f"the served model knows nothing of the last {format_duration(age_s)}; "
                f"follow.fresh_s allows {format_duration(self.fresh_s)}"
            )
        if self.refused:
            is_served = self.event_end_s is not None
            serves = "an earlier model serves on" if is_served else "nothing of it is served"
            alarm_lines.append(
                f"{format_count(self.refused, 'candidate')} in a row refused: {serves}"
            )
        if self.quarantined:
            alarm_lines.append(
                f"{format_count(self.quarantined, 'file')} quarantined, and in no increment"
            )
        return alarm_lines + [f"increment {self.prepared}: {alarm}" for alarm in self.newest_alarms]


def read_status(pipeline: Pipeline) -> PipelineStatus:
    """Return the status of a loop, without the failure of its last stage."""
    follow = pipeline.config.follow
    numbers = list_increment_numbers(follow.stream)
    current = pipeline.channel.current()
    # Listing a log takes time, and an idle step has just listed it.
    log = pipeline.idle or pipeline.log_state()
    shared: dict[str, Any] = {
        "current": current,
        "waiting": len(log.waiting),
        "held": len(log.held),
        "refused_files": log.refused,
        "fresh_s": follow.fresh_s,
        "failure": pipeline.unpublished,
    }
    if not numbers:
        return PipelineStatus(**shared)
    stream = open_stream(follow.stream)
    # Not of an old partition, which leaves the window where it is.
    end = max(stream.record(number).window[1] for number in numbers[-2:])
    is_ahead = end / stream.ticks_per_s > time.time() + _AHEAD_S
    if is_ahead or log.num_late >= _MOST_LATE:
        shared["stuck"] = (
            f"{format_count(log.num_late, 'partition')} late, as the next window begins at "
            f"{format_event_time(end, stream.description['time_unit'])}"
            f"{', in the future' if is_ahead else ''}. If a wrong row has moved it there, set it "
            f"back: gmeta prepare --extend {follow.stream} --begin TIME FILE..."
        )
    served = [
        n for n in numbers if current is not None and pipeline.promoted_version(n) == current.number
    ]
    # The newest may not be trained, or judged, yet.
    newest = numbers[: -1 - _LOOKED_AT : -1]
    forecasts = (read_scores(pipeline.folder(n) / "run" / PREQUENTIAL_FILE) for n in newest)
    verdicts = (pipeline.verdict(n) or {} for n in newest)
    # An increment of an old partition makes a model no older.
    of_time = [n for n in served if "backfill" not in stream.record(n).report] or served
    end_s = stream.record(of_time[-1]).window[1] / stream.ticks_per_s if served else None
    return PipelineStatus(
        prepared=numbers[-1],
        served_increment=served[-1] if served else None,
        event_end_s=end_s,
        refused=len(pipeline.refused_before(numbers[-1] + 1)),
        newest_alarms=tuple(stream.newest.report.get("alarms", ())),
        rows=stream.newest.num_rows,
        forecast=next(filter(None, forecasts), {}),
        calibration=next(filter(None, (_read_calibration(one) for one in verdicts)), None),
        **shared,
    )


def _read_calibration(verdict: Mapping[str, Any]) -> float | None:
    measured = verdict.get("calibration")
    return measured.get("value") if isinstance(measured, dict) else None
