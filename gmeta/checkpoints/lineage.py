"""The lineage of a checkpoint: which increments of a stream its model was trained on, in order.

A run on the next increment goes on only where the increment names the last one of the lineage as
its parent, or leads to it over increments that are skipped on purpose: then none was left out by
chance, none is trained twice, and ids mean what they meant.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gmeta.errors import UserError
from metaio.format.dataset import Dataset
from metaio.stream.chain import increment_before


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


def skipped_before(
    lineage: Lineage, dataset: Dataset, skip: Collection[int], checkpoint: Path
) -> list[Dataset]:
    """Return the increments between the last of a checkpoint's lineage and `dataset`, newest first:
    exactly those of the numbers `skip`, as the model is trained on none of them.

    Raises:
        UserError: the checkpoint or the dataset is of no stream, or an increment was skipped that
            is not in `skip`, is there already, comes out of order, or is of another stream; or
            `skip` names one that does not stand between.
        FormatError: one of them is damaged.
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
    last, number, parent = lineage[-1], place.increment, place.parent
    skipped: list[Dataset] = []
    while parent != last.fingerprint and number - 1 in skip and number - 1 > last.increment:
        before = increment_before(dataset, len(skipped) + 1)
        if before is None or before.manifest.stream is None or before.fingerprint != parent:
            break
        skipped.append(before)
        number, parent = number - 1, before.manifest.stream.parent
    if parent != last.fingerprint:
        raise UserError(
            f"increment {place.increment} of {dataset.url} "
            f"{_fault(lineage, dataset, number, parent)}; checkpoint {checkpoint} was trained on "
            f"{told_increments(lineage)}. Set data.increment to {last.increment + 1} of that stream"
        )
    unused = sorted(set(skip) - set(range(number, place.increment)))
    if unused:
        raise UserError(
            f"run.skip_increments = {sorted(skip)} names increment "
            f"{', '.join(map(str, unused))}, which does not stand between increment "
            f"{last.increment}, the last of {checkpoint}, and {place.increment} of {dataset.url}. "
            "Leave it out"
        )
    return skipped


def _fault(lineage: Lineage, dataset: Dataset, number: int, parent: str) -> str:
    """Return what is wrong with an increment that does not lead back to the last of a lineage:
    from it, over those that are skipped, one comes to increment `number`, with another parent."""
    place, last = dataset.manifest.stream, lineage[-1]
    assert place is not None
    if place.stream != last.stream:
        return f"is of another stream, {place.stream}"
    if any(one.fingerprint == dataset.fingerprint for one in lineage):
        return "was trained on already"
    if place.increment <= last.increment:
        return "comes out of order"
    if number > last.increment + 1:
        skipped = ", ".join(map(str, range(last.increment + 1, number)))
        return f"skips increment {skipped}, which run.skip_increments does not name"
    return (
        f"follows another increment {last.increment} (fingerprint {parent[:12]}, the "
        f"checkpoint's is {last.fingerprint[:12]})"
    )


def told_increments(lineage: Lineage) -> str:
    """Return the increments in words, with those that were skipped."""
    trained = [one.increment for one in lineage]
    first, last = trained[0], trained[-1]
    numbers = f"increment {last}" if len(trained) == 1 else f"increments {first} to {last}"
    skipped = [number for number in range(first, last) if number not in trained]
    left_out = f" without {', '.join(map(str, skipped))}" if skipped else ""
    return f"{numbers}{left_out} of stream {lineage[-1].stream}"
