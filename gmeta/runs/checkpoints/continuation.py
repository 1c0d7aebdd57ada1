"""The checkpoint that a run on a stream's next increment goes on from, and what must not change."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from gmeta.config.train_config import ADAGRADS, OuterConfig, RunConfig, TrainConfig
from gmeta.errors import ConfigError, UserError
from gmeta.runs.checkpoints.lineage import (
    Lineage,
    TrainedIncrement,
    describe_increments,
    read_lineage,
)
from gmeta.runs.checkpoints.progress_file import read_about, read_progress
from gmeta.runs.checkpoints.resume import find_changed_optimizer_keys
from gmeta.runs.checkpoints.selected_checkpoint import check_config, named_checkpoint
from gmeta.runs.early_stop import EarlyStop, make_early_stop
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from metaio.format.dataset import Dataset
from metaio.stream.chain import find_earlier_increment


def find_continued_checkpoint(
    config: TrainConfig, dataset: Dataset
) -> tuple[Path | None, Lineage, list[Dataset]]:
    """Return the checkpoint that a new run goes on from, None without `run.continue_from`, its
    lineage, and the increments that are skipped before `dataset`."""
    named, skip = config.run.continue_from, config.run.skip_increments
    if not named:
        if skip:
            raise ConfigError(
                f"run.skip_increments = {list(skip)} has no effect without run.continue_from: a "
                "model that begins anew is trained on data.increment alone. Leave it out"
            )
        return None, (), []
    _check_discount(config.outer)
    folder, checkpoint = named_checkpoint("run.continue_from", named)
    lineage = read_lineage(read_about(checkpoint))
    skipped = find_skipped_increments(lineage, dataset, skip, checkpoint)
    check_config(checkpoint, config)
    before = folder.read_config()
    # The run folder is named, not one of its checkpoints.
    if folder.root == Path(named):
        _check_finished(folder, before.run, make_early_stop(before))
    # Another optimizer cannot use the state, and new rows would begin unlike old ones.
    changed = find_changed_optimizer_keys(before.outer, config.outer)
    for key in ("loss", *changed, "embedding_init_std"):
        was, requested = getattr(before.outer, key), getattr(config.outer, key)
        if was != requested:
            raise _differs(folder, f"outer.{key}", was, requested)
    if before.run.seed != config.run.seed:
        raise _differs(folder, "run.seed", before.run.seed, config.run.seed)
    return checkpoint, lineage, skipped


def extend_lineage(before: Lineage, dataset: Dataset) -> Lineage:
    """Return the lineage of a model that is trained on `dataset` next; empty outside a stream."""
    place = dataset.manifest.stream
    if place is None:
        return ()
    position = TrainedIncrement(place.stream, place.increment, dataset.fingerprint, 0)
    return (*before, position)


def find_skipped_increments(
    lineage: Lineage, dataset: Dataset, skip: Collection[int], checkpoint: Path
) -> list[Dataset]:
    """Return the increments of `skip` between a checkpoint's last and `dataset`, newest first."""
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
    # From parent to parent: none is left out by chance or trained twice, and ids keep meaning.
    last, number, parent = lineage[-1], place.increment, place.parent
    skipped: list[Dataset] = []
    while parent != last.fingerprint and number - 1 in skip and number - 1 > last.increment:
        before = find_earlier_increment(dataset, len(skipped) + 1)
        if before is None or before.manifest.stream is None or before.fingerprint != parent:
            break
        skipped.append(before)
        number, parent = number - 1, before.manifest.stream.parent
    if parent != last.fingerprint:
        raise UserError(
            f"increment {place.increment} of {dataset.url} "
            f"{_explain_gap(lineage, dataset, number, parent)}; checkpoint {checkpoint} was "
            f"trained on {describe_increments(lineage)}. Set data.increment to "
            f"{last.increment + 1} of that stream"
        )
    unused = sorted(set(skip) - set(range(number, place.increment)))
    if unused:
        raise UserError(
            f"run.skip_increments = {sorted(skip)} names increment {', '.join(map(str, unused))}, "
            f"which does not stand between increment {last.increment}, the last of {checkpoint}, "
            f"and {place.increment} of {dataset.url}. Leave it out"
        )
    return skipped


def _explain_gap(lineage: Lineage, dataset: Dataset, number: int, parent: str) -> str:
    """Return what is wrong with an increment from which skipping leads back to `number`, whose
    `parent` is not the lineage's last."""
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


def _check_discount(outer: OuterConfig) -> None:
    # A discount that changes nothing is refused: neither optimizer keeps Adagrad's sums.
    kinds = (outer.dense_optimizer, outer.sparse_optimizer)
    if outer.adagrad_decay < 1.0 and not set(kinds) & set(ADAGRADS):
        raise ConfigError(
            f"outer.adagrad_decay = {outer.adagrad_decay:g}, but neither outer.dense_optimizer = "
            f"{kinds[0]!r} nor outer.sparse_optimizer = {kinds[1]!r} keeps sums of squares. Leave "
            "it 1, or choose one of Adagrad's kinds"
        )


def _check_finished(folder: RunFolder, run: RunConfig, early_stop: EarlyStop) -> None:
    # The next increment would leave out the rest. Naming a checkpoint instead is a choice.
    progress = read_progress(list_checkpoints(folder.checkpoints)[-1])
    if not (
        progress.epoch >= run.epochs
        or 0 < run.max_steps <= progress.step
        or early_stop.is_over(progress)
    ):
        raise UserError(
            f"run.continue_from = {str(folder.root)!r} is not over: it stands at step "
            f"{progress.step}, in epoch {progress.epoch + 1} of {run.epochs}. Let it end, with "
            "--resume if it was stopped, or name one of its checkpoints"
        )


def _differs(folder: RunFolder, key: str, previous: Any, requested: Any) -> UserError:
    return UserError(
        f"{key} = {requested!r}, but run {folder.root}, which run.continue_from goes on from, was "
        f"trained with {previous!r}: weights, optimizer state and new rows would not belong "
        "together. Set it as it was"
    )
