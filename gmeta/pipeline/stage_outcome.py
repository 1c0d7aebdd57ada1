"""The stages of a loop by name, their outcomes, and files that they leave."""

from dataclasses import dataclass

STAGES = (
    "fetch",
    "prepare",
    "train",
    "export",
    "judge",
    "promote",
    "publish",
    "score",
    "challenge",
)
# Those that are commands of `gmeta channel`.
CHANNEL_STAGES = ("judge", "promote", "publish")
FROZEN_FILE, ENDED_FILE, CHALLENGE_FILE = "frozen.json", "stages.jsonl", "challenge.json"


@dataclass(frozen=True)
class StageOutcome:
    """One stage that ended: its increment (0: not known yet), summary and seconds."""

    stage: str
    increment: int
    took_s: float
    summary: str


@dataclass(frozen=True)
class RunningStage:
    """The stage that runs: its increment (0: not known yet) and its start."""

    stage: str
    increment: int
    since_s: float  # of time.monotonic
