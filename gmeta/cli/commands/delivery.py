"""`gmeta channel judge`, `promote`, `rollback` and `publish`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands.rank_launch import faster_import
from gmeta.errors import UserError
from gmeta.platform.files.local_paths import check_local
from gmeta.serving.table_format import TableFormat

# The exit code of a refusal, which is no failure.
REFUSED = 3

ChannelAt = Annotated[Path, typer.Argument(metavar="CHANNEL", help="folder of the versions")]
Candidate = Annotated[
    Path, typer.Argument(metavar="RUN|EXPORT", help="folder of a run, or what `gmeta export` wrote")
]


def promote(
    candidate: Candidate,
    channel: ChannelAt,
    tables: Annotated[
        TableFormat, typer.Option(help="RUN: how embedding tables are held")
    ] = "float32",
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="RUN: checkpoint to export; default: the newest, with early stopping the best",
        ),
    ] = None,
    verdict: Annotated[
        Path | None,
        typer.Option(help="verdict of `gmeta channel judge --out`, kept with the version"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="promote against a --verdict that refuses it")
    ] = False,
    keep: Annotated[
        int,
        typer.Option(
            min=0,
            help="remove older versions: so many of the newest stay, what is served, what a "
            "rollback goes back to, and what these build on; 0: all",
        ),
    ] = 0,
) -> None:
    """Make a run's model, or an export, the one that a channel serves.

    gmeta channel promote runs/day-2 channels/clicks

    A run is exported first, as what changed since the version that is served. Servers of the
    channel (gmeta serve CHANNEL, gmeta.follow) take it up within seconds. Promoting what is served
    already changes nothing."""
    _check_places(candidate, channel)
    # Late, here and below: loading torch takes seconds, and a wrong option is reported at once.
    with faster_import():
        from gmeta.cli.commands.work.channel_changes import promote_candidate
    promote_candidate(candidate, channel, tables, step, verdict, force, keep)


def rollback(
    channel: ChannelAt,
    to: Annotated[
        int | None, typer.Option(min=1, help="version to serve; default: what served before")
    ] = None,
) -> None:
    """Let a channel serve an earlier version again.

    gmeta channel rollback channels/clicks --to 7

    Only the pointer moves, and --to serves a later one again."""
    check_local("CHANNEL", channel)
    with faster_import():
        from gmeta.cli.commands.work.channel_changes import roll_back
    roll_back(channel, to)


def publish(
    path: Annotated[
        Path, typer.Argument(metavar="CHANNEL|STREAM", help="folder of the versions or increments")
    ],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="any URL of fsspec: s3://bucket/clicks")
    ],
) -> None:
    """Copy a channel, or a stream, to a URL, from where other machines follow it.

    gmeta channel publish channels/clicks s3://bucket/clicks

    Of a channel the versions go up whole that are not there yet, then the pointer: gmeta serve URL
    and gmeta.follow(URL) have the version before or the new one, wherever this is stopped. Run it
    after each promotion and rollback; `follow.mirror` of `gmeta follow` does. Of a stream the
    increments go up, and what the next one needs to know."""
    check_local("CHANNEL|STREAM", path)
    with faster_import():
        from gmeta.cli.commands.work.channel_changes import publish_to
    publish_to(path, url)


def judge(
    candidate: Candidate,
    champion: Annotated[Path, typer.Option(metavar="CHANNEL", help="channel to compare with")],
    split: Annotated[str, typer.Option(help="split of tasks that no model was trained on")] = (
        "gate"
    ),
    on: Annotated[
        str,
        typer.Option(
            help="dataset, or STREAM:NUMBER, to judge on; default: what RUN was trained on"
        ),
    ] = "",
    margin: Annotated[
        float | None,
        typer.Option(
            min=0, help="loss that may be worse by chance; default: 1 % of the champion's"
        ),
    ] = None,
    pool: Annotated[
        int, typer.Option(min=0, max=1000, help="earlier increments to add where tasks are few")
    ] = 7,
    calibration: Annotated[
        str, typer.Option(help="LEAST:MOST mean prediction over mean label, of clicks")
    ] = "0.9:1.1",
    out: Annotated[Path | None, typer.Option(help="JSON file for the verdict")] = None,
) -> None:
    """Compare a run with the model that a channel serves, on tasks that neither was trained on.

    gmeta channel judge runs/day-2 --champion channels/clicks

    Promotes (exit code 0) where all predictions are finite, their mean is within --calibration of
    the labels', and the loss, paired task by task, is at most a margin worse at 95 %. Refuses with
    exit code 3, and keeps the verdict in the channel. Nothing is promoted: that is `gmeta channel
    promote`."""
    _check_places(candidate, champion)
    if out is not None:
        check_local("--out", out)
    with faster_import():
        from gmeta.cli.commands.work.channel_changes import judge_candidate
    band = _parse_band(calibration)
    if not judge_candidate(candidate, champion, on, split, margin, pool, band, out):
        raise typer.Exit(REFUSED)


def _parse_band(text: str) -> tuple[float, float]:
    try:
        least, most = map(float, text.split(":"))
        if 0 <= least <= 1 <= most < math.inf:
            return least, most
    except ValueError:
        pass
    raise UserError(
        f"--calibration = {text!r} is no band around 1: LEAST:MOST is allowed, from 0 to 1 "
        "and from 1 on. Write e.g. 0.9:1.1"
    )


def _check_places(candidate: Path, channel: Path) -> None:
    check_local("CHANNEL", channel)
    if not candidate.is_dir():
        raise UserError(
            f"{candidate} is no folder: a run or an exported model is needed. Give the run.dir of "
            "a training run, or a folder that `gmeta export` wrote"
        )
