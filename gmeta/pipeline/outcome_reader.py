"""Reads the outcome of each increment of a stream from the files that its stages left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from gmeta.errors import UserError
from gmeta.pipeline.increment_outcome import Day
from gmeta.pipeline.stage_outcome import ENDED_FILE, FROZEN_FILE
from gmeta.platform.files.checked_json import json_object, read_json
from gmeta.runs.run_folder import PREQUENTIAL_FILE
from metaio.stream.chain import IncrementRecord, list_increment_numbers, open_stream

if TYPE_CHECKING:
    from gmeta.pipeline.pipeline import Pipeline

# More increments than these newest would be no picture.
_SHOWN = 200
# The split of most rows; no model has seen it when it is forecast.
TRAINED_ON = "train"


def read_days(loop: Pipeline) -> list[Day]:
    """Return the newest increments of a loop's stream, oldest first."""
    url = loop.config.follow.stream
    numbers = list_increment_numbers(url)
    if not numbers:
        return []
    stream, best, days = open_stream(url), _best_by_partition(loop.config.follow.best), []
    ticks_per_s = stream.ticks_per_s
    for number in numbers[-_SHOWN:]:
        record, promoted = stream.record(number), loop.promoted_version(number)
        root = loop.folder(number)
        is_kept = promoted is not None and loop.channel.folder_of(promoted).is_dir()
        days.append(
            Day(
                record=record,
                window_s=(record.window[0] / ticks_per_s, record.window[1] / ticks_per_s),
                verdict=loop.verdict(number) or {},
                version=loop.channel.version(promoted or 0) if is_kept else None,
                forecast=read_scores(root / "run" / PREQUENTIAL_FILE),
                frozen=read_scores(root / FROZEN_FILE),
                best_auc=_best_of(record, best),
                challenge=loop.challenge(number),
                took_s=_read_seconds(root / ENDED_FILE),
            )
        )
    return days


def read_scores(path: Path) -> dict[str, float]:
    """Return the scores of an increment in a file of a stage; what cannot be read is left out."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        scores = read_json(path)["splits"][TRAINED_ON]["scores"]
        return {name: float(value) for name, value in scores.items() if value is not None}
    return {}


def _read_seconds(path: Path) -> dict[str, float]:
    seconds_by_stage: dict[str, float] = {}
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            # A kill may cut a line short.
            with suppress(ValueError, LookupError, TypeError):
                entry = json_object(line)
                seconds_by_stage[str(entry["stage"])] = float(entry["took_s"])
    return seconds_by_stage


def _best_by_partition(path: str) -> dict[str, float]:
    """Return the best possible AUC by the name of a partition; none without a file."""
    if not path:
        return {}
    try:
        listed = json.loads(Path(path).read_text())
        return {str(one["day"]): float(one["auc_of_p_click"]) for one in listed}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"follow.best = {path!r} is no list of {{day, auc_of_p_click}}: {error}. Give the "
            "days.json of the recipe synthetic-days, or leave it empty"
        ) from error


def _best_of(record: IncrementRecord, best: Mapping[str, float]) -> float | None:
    names = [PurePosixPath(one["name"]).parts for one in record.report.get("inputs", ())]
    known = {part for parts in names for part in parts if part in best}
    # Of several partitions together no best is known.
    return best[known.pop()] if len(known) == 1 else None
