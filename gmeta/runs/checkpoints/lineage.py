"""The lineage of a checkpoint: the increments that its model was trained on, in order."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainedIncrement:
    """An increment that a model was trained on, and its outer steps."""

    stream: str
    increment: int
    fingerprint: str
    steps: int


Lineage = tuple[TrainedIncrement, ...]


def read_lineage(about: Mapping[str, Any]) -> Lineage:
    """Return a progress.json's lineage; empty outside a stream. Raises ValueError: it is none."""
    entries = about.get("lineage", [])
    # Classes, as this file does not postpone annotations; exact ones, as True is an int, too.
    wanted = TrainedIncrement.__annotations__
    if not isinstance(entries, list):
        raise ValueError(f"its lineage is {entries!r:.60}, not a list")
    for one in entries:
        if not isinstance(one, dict) or {key: type(v) for key, v in one.items()} != wanted:
            raise ValueError(f"its lineage holds {one!r:.60}, which is no increment")
    return tuple(TrainedIncrement(**one) for one in entries)


def lineage_to_json(lineage: Lineage, steps: int) -> dict[str, Any]:
    """Return the lineage for progress.json, `steps` steps into its last increment."""
    if not lineage:
        return {}  # of a dataset that stands alone
    entries = [asdict(one) for one in lineage]
    entries[-1]["steps"] = steps
    return {"lineage": entries}


def count_earlier_steps(lineage: Lineage) -> int:
    """Return the outer steps on all increments but the last."""
    return sum(one.steps for one in lineage[:-1])


def describe_increments(lineage: Lineage) -> str:
    """Return the increments in words, with those that were skipped."""
    trained = [one.increment for one in lineage]
    first, last = trained[0], trained[-1]
    numbers = f"increment {last}" if len(trained) == 1 else f"increments {first} to {last}"
    skipped = [number for number in range(first, last) if number not in trained]
    left_out = f" without {', '.join(map(str, skipped))}" if skipped else ""
    return f"{numbers}{left_out} of stream {lineage[-1].stream}"
