"""The lineage of a checkpoint: which increments of a stream its model was trained on, in order."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainedIncrement:
    """An increment that a model was trained on, and the outer steps that were taken on it."""

    stream: str
    increment: int
    fingerprint: str
    steps: int


Lineage = tuple[TrainedIncrement, ...]


def read_lineage(about: Mapping[str, Any]) -> Lineage:
    """Return the lineage in a checkpoint's progress.json; empty for a model of a dataset that
    stands alone. Raises ValueError: it is no list of increments."""
    entries = about.get("lineage", [])
    wanted = TrainedIncrement.__annotations__
    if not isinstance(entries, list):
        raise ValueError(f"its lineage is {entries!r:.60}, not a list")
    for one in entries:
        if not isinstance(one, dict) or {key: type(v) for key, v in one.items()} != wanted:
            raise ValueError(f"its lineage holds {one!r:.60}, which is no increment")
    return tuple(TrainedIncrement(**one) for one in entries)


def lineage_to_json(lineage: Lineage, steps: int) -> dict[str, Any]:
    """Return what progress.json says of a lineage, `steps` steps into its last increment."""
    if not lineage:
        return {}  # of a dataset that stands alone
    entries = [asdict(one) for one in lineage]
    entries[-1]["steps"] = steps
    return {"lineage": entries}


def count_earlier_steps(lineage: Lineage) -> int:
    """Return the outer steps that were taken on all increments but the last."""
    return sum(one.steps for one in lineage[:-1])


def describe_increments(lineage: Lineage) -> str:
    """Return the increments in words, with those that were skipped."""
    trained = [one.increment for one in lineage]
    first, last = trained[0], trained[-1]
    numbers = f"increment {last}" if len(trained) == 1 else f"increments {first} to {last}"
    skipped = [number for number in range(first, last) if number not in trained]
    left_out = f" without {', '.join(map(str, skipped))}" if skipped else ""
    return f"{numbers}{left_out} of stream {lineage[-1].stream}"
