"""The work of `gmeta channel judge`, `promote`, `rollback` and `publish`."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from gmeta.cli.commands.console import make_console, make_table, print_result, show_table
from gmeta.cli.commands.inspect import is_run
from gmeta.cli.commands.work.next_version import (
    describe_version,
    export_since,
    open_or_new_channel,
    temporary_beside,
)
from gmeta.data.opening import open_by_name, open_data
from gmeta.errors import GMetaError, NotFiniteError, UserError
from gmeta.metrics.catalogue import LIST_LOSSES
from gmeta.runs.run_folder import RunFolder
from gmeta.serving.channel.champion_judge import Verdict, judge, refuse_model, windows_before
from gmeta.serving.channel.channel import CURRENT_FILE, Channel, is_channel
from gmeta.serving.channel.current_version import translate_access_errors
from gmeta.serving.channel.decision_files import read_verdict, write_verdict
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.model_version import copy_version, is_delta, read_version
from gmeta.serving.channel.remote_channel import publish
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.channel.version_retention import prune
from gmeta.serving.export import export_run
from gmeta.serving.exported_folder import check_files, read_config
from gmeta.serving.model_loader import load
from gmeta.serving.table_format import TableFormat
from metaio.errors import MetaIOError
from metaio.format.dataset import Dataset, open_dataset
from metaio.quantities import format_count
from metaio.stream.chain import STREAM_FILE, is_stream, open_stream
from metaio.stream.publish import publish_stream


def promote_candidate(
    candidate: Path,
    root: Path,
    tables: TableFormat,
    step: int | None,
    verdict: Path | None,
    force: bool = False,
    keep: int = 0,
) -> None:
    """Promote a run or an export, print what serves, and remove old versions if `keep` is not 0."""
    channel = open_or_new_channel(root)
    try:
        kept = None if verdict is None else read_verdict(verdict)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--verdict = {str(verdict)!r} is no verdict: {error}. Give what `gmeta channel "
            "judge --out` wrote"
        ) from error
    is_refused = kept is not None and kept.get("verdict") == "refuse"
    reasons = "; ".join(kept.get("reasons", [])) if kept is not None else ""
    if is_refused and not force:
        raise UserError(
            f"--verdict = '{verdict}' refuses it: {reasons}. Pass --force to promote it all the "
            "same"
        )
    offered = None if is_run(candidate) else read_version(candidate)
    with temporary_beside(root / "candidate", str(root)) as packed:
        if offered is None:
            export_since(candidate, packed, root, tables, step, True)
        # A delta, or the model that serves already, has nothing left to pack.
        elif offered.delta is not None or channel.serves_model_of(offered):
            packed = candidate
        else:
            with temporary_beside(root / "model", str(root)) as model:
                check_files(candidate, read_config(candidate), checksums=False)
                # Copied, not linked: a later change of the folder by its owner must not reach the
                # channel.
                copy_version(offered, model, shutil.copyfile)
                pack(channel, model, packed, overwrite=True)
        # A folder of its own is linked by the channel; the caller's is copied, as it may change.
        is_own = packed != candidate
        current = channel.promote(packed, kept, is_own=is_own, named_in_messages=candidate)
    version = channel.version(current.number)
    print_result(channel=root, serves=version.number, checksum=version.checksum)
    make_console(stderr=True).print(
        f"served: version {version.name} of {root}  ({describe_version(version)})"
    )
    if is_refused:
        make_console(stderr=True).print(f"against its verdict: {reasons}")
    if keep:
        _remove_older(channel, keep)


def _remove_older(channel: Channel, keep: int) -> None:
    try:
        gone = prune(channel, keep)
    # The promotion is done: damaged versions, or another process at work, do not make it fail.
    except (GMetaError, MetaIOError) as error:
        make_console(stderr=True).print(f"nothing is removed: {error}")
        return
    if gone:
        make_console(stderr=True).print(f"removed: version {', '.join(map(str, reversed(gone)))}")


def judge_candidate(
    candidate: Path,
    root: Path,
    on: str,
    split: str,
    margin: float | None,
    pool: int,
    band: tuple[float, float],
    out: Path | None,
) -> bool:
    """Judge a run or an export, print and write the verdict; return whether to promote it."""
    channel = open_or_new_channel(root)
    own_folder = temporary_beside(root.parent / f"{root.name}.judged", f"what {root} is judged by")
    with own_folder if is_run(candidate) else nullcontext(candidate) as model_place:
        try:
            model, dataset_of_run = _model_and_data(candidate, model_place)
            dataset = open_by_name(on) if on else dataset_of_run()
            verdict = judge_model(channel, model, dataset, split, margin, pool, band)
        # Weights that are not finite cannot be exported: that is a verdict, not a failure.
        except NotFiniteError as error:
            verdict = refuse_model(str(error))
    if not verdict.promote:
        # A promotion is recorded as it happens: the verdict travels with it.
        channel.record(verdict.to_json())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_verdict(out, verdict.to_json())
    show_verdict(verdict)
    return verdict.promote


def judge_model(
    channel: Channel, model: Path, dataset: Dataset, split: str, margin: float | None, pool: int,
    band: tuple[float, float],
) -> Verdict:  # fmt: skip
    """Return the verdict on an exported model by a dataset and earlier increments of its stream."""
    current = channel.current()
    champion = None if current is None else materialize_version(channel, current.number)
    windows = windows_before(dataset)
    verdict = judge(model, champion, windows, split, margin, pool, band)
    return replace(
        verdict,
        champion_version=None if current is None else current.number,
        model=read_version(model).checksum,
        dataset=dataset.fingerprint,
    )


def show_verdict(verdict: Verdict) -> None:
    """Print a verdict on one screen."""
    print_result(**verdict.to_json())
    console = make_console()
    heads = ("model", *verdict.candidate)
    table = make_table("Gate", *heads, text=("model",))
    champion = f"champion (version {verdict.champion_version})"
    for name, scores in (("candidate", verdict.candidate), (champion, verdict.champion)):
        if scores:
            score_texts = ("-" if value is None else f"{value:.4f}" for value in scores.values())
            table.add_row(name, *score_texts)
    show_table(console, table)
    measured = {
        f"{verdict.metric} better by": verdict.difference,
        "predictions over labels": verdict.calibration,
    }
    for what, one in measured.items():
        if one is not None and one.value is not None:
            ends = "no interval" if one.low is None else f"95 % {one.low:.4g} to {one.high:.4g}"
            console.print(f"{what} {one.value:.4g} ({ends})")
    if verdict.metric in LIST_LOSSES:
        console.print("predictions over labels - (scores of a ranking loss have no level)")
    waiting = ""
    if verdict.num_waiting:
        waiting = f", {format_count(verdict.num_waiting, 'row')} waiting for a label"
    console.print(
        f"over {verdict.num_rows:,} rows of {format_count(verdict.num_tasks, 'task')} of "
        f"{format_count(verdict.windows, 'window')}{waiting}"
        + ("" if verdict.margin is None else f"; margin {verdict.margin:.4g}")
    )
    if verdict.champion_version is None:
        console.print("no champion: the channel serves no version yet")
    console.print("promote" if verdict.promote else f"refuse: {'; '.join(verdict.reasons)}")


def _model_and_data(candidate: Path, model_place: Path) -> tuple[Path, Callable[[], Dataset]]:
    """Return a candidate's exported model (a run's: `model_place`), and what opens its dataset."""
    if is_run(candidate):
        export_run(candidate, model_place, overwrite=True, load=load)
        # A function: with --on the run's own dataset need not be there.
        return model_place, partial(open_data, RunFolder(candidate).read_config().data)
    if is_delta(candidate):
        raise UserError(
            f"{candidate} is a delta, which predicts nothing alone. Judge the run or a full export"
        )
    return candidate, partial(open_dataset, str(read_config(candidate).source.get("dataset", "")))


def roll_back(root: Path, to: int | None) -> None:
    """Make an earlier version the one that serves, and print which."""
    if not is_channel(root):
        raise UserError(
            f"{root} is no channel: there is no {CURRENT_FILE}. Give a folder that `gmeta "
            "channel promote` wrote"
        )
    current = Channel(root).rollback(to)
    print_result(channel=root, serves=current.number, checksum=current.checksum)
    make_console(stderr=True).print(f"served: version {current.parent.name} of {root} again")


def publish_to(root: Path, url: str) -> None:
    """Copy a channel or a stream to a URL, and print what was copied."""
    url = url.rstrip("/")
    if is_channel(root):
        channel = Channel(root)
        copied, noun = publish(channel, url), "version"
        newest = f"version {channel.require_current().parent.name}"
    elif is_stream(str(root)):
        with translate_access_errors(url):
            copied, noun = publish_stream(root, url), "increment"
        newest = f"increment {open_stream(str(root)).numbers[-1]}"
    else:
        raise UserError(
            f"{root} is no channel and no stream: there is neither {CURRENT_FILE} nor "
            f"{STREAM_FILE}. Give a folder that `gmeta channel promote` or `gmeta prepare "
            "--extend` wrote"
        )
    print_result(path=root, url=url, copied=copied)
    make_console(stderr=True).print(
        f"published: {newest} of {root} at {url}  ({format_count(len(copied), noun)} copied)"
    )
