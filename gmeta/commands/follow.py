"""`gmeta follow`: from a log that goes on to a model that is served, for as long as it runs."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from gmeta.commands.screen import screen
from gmeta.errors import GMetaError
from gmeta.files.local import check_local
from gmeta.files.whole import write_whole
from gmeta.loop.config import load_follow_config
from metaio.errors import MetaIOError


def follow(
    config: Annotated[Path, typer.Argument(help="TOML file: what is followed, and how")],
    once: Annotated[
        bool, typer.Option("--once", help="end when every closed partition is served or refused")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(help="HTML file for a picture of the stream, drawn anew as it goes"),
    ] = None,
    metrics: Annotated[str, typer.Option(help="HOST:PORT for Prometheus; empty for none")] = "",
) -> None:
    """Turn closed partitions of a log into increments, train on each, judge it and promote it.

    gmeta follow stream.toml

    Prints a line a stage. A kill at any point loses nothing: started again, it goes on where it
    was. A candidate that the judge refuses leaves the champion, which the next is trained on from.
    """
    settings = load_follow_config(config)
    from gmeta.loop.loop import Loop
    from gmeta.loop.metrics import LoopMetrics
    from gmeta.loop.page import stream_page
    from gmeta.loop.stages import last_line, run_stage

    if page is not None:
        check_local("--page", page)
        page.parent.mkdir(parents=True, exist_ok=True)
    loop = Loop(settings, run_stage, last_line)
    measured, console, ended = LoopMetrics(loop), screen(), threading.Event()
    if metrics:
        measured.serve(metrics)
    if not once:
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
    told = ""
    while not ended.is_set():
        try:
            done = loop.step()
            measured.look()
        except (GMetaError, MetaIOError, OSError) as error:
            if once:
                raise
            measured.failed()
            if str(error) != told:  # not every few seconds
                told = str(error)
                console.print(f"waiting: {told}")
            ended.wait(settings.follow.every_s)
            continue
        if done is not None:
            told = ""
            measured.done(done)
            number, took = done.increment or "-", f"{done.took_s:7.1f} s"
            console.print(f"increment {number}  {done.stage:<8}{took}  {done.told}")
            if page is not None and done.stage in ("judge", "promote"):
                write_whole(page, stream_page(loop).encode())
        elif once:
            return
        else:
            ended.wait(settings.follow.every_s)
