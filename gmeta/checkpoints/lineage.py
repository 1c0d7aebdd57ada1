"""The lineage of a checkpoint: which increments of a stream its model was trained on, in order.

A run on the next increment goes on only where the increment names the last one of the lineage as
its parent: then none was left out, none is trained twice, and ids mean what they meant.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gmeta.errors import UserError
from metaio.format.dataset import Dataset


@dataclass(frozen=True)
class TrainedIncrement:
    """An increment that a model was trained on, and the outer steps that were taken on it."""

    stream: str
    increment: int
    fingerprint: str
    steps: int


Lineage = tuple[TrainedIncrement, ...]


def lineage_of(about: Mapping[str, Any]) -> Lineage:
    """Return the lineage in a checkpoint's progress.json; empty of a model of a dataset that stands
    alone.

    Raises:
        ValueError: it is no list of increments.
    """
    told = about.get("lineage", [])
    wanted = TrainedIncrement.__annotations__
    if not isinstance(told, list):
        raise ValueError(f"its lineage is {told!r:.60}, not a list")
    for one in told:
        if not isinstance(one, dict) or {key: type(v) for key, v in one.items()} != wanted:
            raise ValueError(f"its lineage holds {one!r:.60}, which is no increment")
    return tuple(TrainedIncrement(**one) for one in told)


def told_lineage(lineage: Lineage, steps: int) -> dict[str, Any]:
    """Return what progress.json says of a lineage, so many steps into its last increment."""
    if not lineage:
        return {}  # of a dataset that stands alone
    entries = [asdict(one) for one in lineage]
    entries[-1]["steps"] = steps
    return {"lineage": entries}


def steps_before(lineage: Lineage) -> int:
    """Return the outer steps that were taken on all increments but the last."""
    return sum(one.steps for one in lineage[:-1])


def next_lineage(before: Lineage, dataset: Dataset) -> Lineage:
    """Return the lineage of a model that is trained on `dataset` next; empty where that stands
    alone."""
    place = dataset.manifest.stream
    if place is None:
        return ()
    own = TrainedIncrement(place.stream, place.increment, dataset.fingerprint, 0)
    return (*before, own)


def check_next(lineage: Lineage, dataset: Dataset, checkpoint: Path) -> None:
    """Refuse to train a checkpoint's model on anything but the increment after its last.

    Raises:
        UserError: the checkpoint or the dataset is of no stream, or an increment was skipped, is
            there already, comes out of order, or is of another stream.
    """
    place = dataset.manifest.stream
    if place is None:
        raise UserError(
            f"dataset {dataset.url} is no increment of a stream, and run.continue_from goes on to "
            "the next increment alone. Make one with gmeta prepare --extend, or begin with the "
            "weights on the same data: run.start_from"
        )
    if not lineage:
        raise UserError(
            f"checkpoint {checkpoint} was trained on no increment of a stream: increment "
            f"{place.increment} of {dataset.url} cannot follow it. Name a run that was"
        )
    last = lineage[-1]
    if place.parent == last.fingerprint:
        return
    raise UserError(
        f"increment {place.increment} of {dataset.url} {_fault(lineage, dataset)}; checkpoint "
        f"{checkpoint} was trained on {told_increments(lineage)}. "
        f"Set data.increment to {last.increment + 1} of that stream"
    )


def _fault(lineage: Lineage, dataset: Dataset) -> str:
    """Return what is wrong with an increment whose parent is not the last of a lineage."""
    place, last = dataset.manifest.stream, lineage[-1]
    assert place is not None
    if place.stream != last.stream:
        return f"is of another stream, {place.stream}"
    if any(one.fingerprint == dataset.fingerprint for one in lineage):
        return "was trained on already"
    if place.increment <= last.increment:
        return "comes out of order"
    if place.increment > last.increment + 1:
        skipped = range(last.increment + 1, place.increment)
        return f"skips increment {', '.join(map(str, skipped))}"
    return (
        f"follows another increment {last.increment} (fingerprint {place.parent[:12]}, the "
        f"checkpoint's is {last.fingerprint[:12]})"
    )


def told_increments(lineage: Lineage) -> str:
    """Return the increments in words."""
    first, last = lineage[0].increment, lineage[-1].increment
    numbers = f"increment {last}" if len(lineage) == 1 else f"increments {first} to {last}"
    return f"{numbers} of stream {lineage[-1].stream}"
