"""The stages of a loop by name, what is reported of one, and files that they leave behind."""

from dataclasses import dataclass

STAGES = ("prepare", "train", "export", "judge", "promote", "publish", "score")
FROZEN_FILE, ENDED_FILE = "frozen.json", "stages.jsonl"


@dataclass(frozen=True)
class StageOutcome:
    """One stage that ended: of which increment (0: not known yet), how, and in how long."""

    stage: str
    increment: int
    took_s: float
    summary: str


@dataclass(frozen=True)
class RunningStage:
    """The stage that a loop is in: of which increment (0: not known yet), since when."""

    stage: str
    increment: int
    since_s: float  # of time.monotonic
