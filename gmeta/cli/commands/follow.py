"""`gmeta follow`: trains on a growing log and promotes models, for as long as it runs."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gmeta.access.address import split_address
from gmeta.access.credentials import is_loopback
from gmeta.access.protection import Protection
from gmeta.cli.commands.console import make_console
from gmeta.cli.commands.error_messages import format_error
from gmeta.cli.commands.server_options import TlsCert, TlsClientCa, TlsKey, TokenFolder
from gmeta.errors import GMetaError, UserError
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.pipeline_metrics import PipelineMetrics
from gmeta.pipeline.stage_process import end_stage, last_line, run_stage
from gmeta.platform.files.local_paths import check_local
from gmeta_keys.stop_flag import StopFlag
from metaio.errors import MetaIOError

if TYPE_CHECKING:
    from gmeta.pipeline.live_page import StreamPageServer

_DRAWN_EVERY_S = 60.0  # of a page, while there is always something to do


def follow(
    config: Annotated[Path, typer.Argument(help="TOML file: what is followed, and how")],
    once: Annotated[
        bool, typer.Option("--once", help="end when every closed partition is served or refused")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(help="HTML file for a picture of the stream, drawn anew as it goes"),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT for the page, live, and /metrics; empty for none")
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="wait for a person at a damaged file")
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    tokens: TokenFolder = None,
) -> None:
    """Turn closed partitions of a log into increments, train on each, judge it and promote it.

    gmeta follow stream.toml

    Prints a line a stage. A kill at any point loses nothing: started again, it goes on where it
    was. A candidate that the judge refuses leaves the champion, which the next is trained on from.
    """
    settings = load_follow_config(config)
    protection = Protection(
        tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, tokens=tokens
    )
    tls, proofs = protection.load_credentials()
    if listen and not protection.secured and not is_loopback(split_address("--listen", listen)[0]):
        raise UserError(
            f"--listen {listen} can be reached from other machines. Pass --tls-cert, --tls-key "
            "and one of --tokens and --tls-client-ca; or listen on 127.0.0.1"
        )
    if page is not None:
        check_local("--page", page)
        page.parent.mkdir(parents=True, exist_ok=True)
    # This process stays without torch: each stage runs in a process of its own, which has it
    # (gmeta/pipeline/stage_process.py).
    loop = Pipeline(settings, run_stage, last_line, strict)
    metrics, stop = PipelineMetrics(loop), StopFlag()
    live, draw = None, None
    if listen or page is not None:
        # Late, as drawing loads matplotlib, which takes half a second.
        from gmeta.pipeline.live_page import StreamPageServer, write_page

        live = StreamPageServer(loop, metrics, listen, tls, proofs) if listen else None
        draw = None if page is None else partial(write_page, page, loop, metrics)
    if not once:

        def end(*_: object) -> None:
            stop.stop()
            end_stage()

        signal.signal(signal.SIGTERM, end)
    _run_stages(loop, metrics, stop, once, draw, live)


def _print_line(line: str) -> None:
    """Print a line, unless the disk of the log is full: that is no reason to end."""
    try:
        make_console().print(line)
    # The reader of the pipe is gone: there is no one to print for.
    except BrokenPipeError:
        raise
    except OSError:
        return


def _run_stages(
    pipeline: Pipeline,
    metrics: PipelineMetrics,
    stop: StopFlag,
    once: bool,
    draw: Callable[[], None] | None,
    live: "StreamPageServer | None",
) -> None:
    """Run stages until a signal sets `stop` or, with `once`, nothing is left to do."""
    reported, drawn_s = "", 0.0
    every_s = pipeline.config.follow.every_s
    is_drawn = False
    while not stop:
        try:
            done = pipeline.step()
            if done is not None:
                reported, is_drawn = "", False
                metrics.count_stage(done)
                number, took = done.increment or "-", f"{done.took_s:7.1f} s"
                _print_line(f"increment {number}  {done.stage:<8}{took}  {done.summary}")
            metrics.refresh()
            if done is not None and live is not None:
                live.redraw()
            lacking = pipeline.missing_input() or metrics.status.stuck if done is None else ""
            # In an idle moment, or at the latest after a minute: drawing takes a second.
            is_idle = done is None or time.monotonic() - drawn_s > _DRAWN_EVERY_S
            if draw is not None and not is_drawn and is_idle:
                draw()
                is_drawn, drawn_s = True, time.monotonic()
        except (GMetaError, MetaIOError, OSError) as error:
            # A single pass ends with its failure; a service tries again.
            if once:
                raise
            # The stage failed because the signal ended it.
            reason, _ = format_error(error)
            if stop and reason != reported:
                _print_line(f"stopped: {reason}")
                return
            metrics.note_failure(reason)
            # Once, not at each try, which are seconds apart.
            if reason != reported:
                reported = reason
                _print_line(f"waiting: {reported}")
                if draw is not None:
                    # Drawing reads what the stage reads: it may be what fails.
                    with suppress(GMetaError, MetaIOError, OSError):
                        draw()
            stop.wait(every_s)
            continue
        if done is None:
            if lacking and lacking != reported:
                _print_line(lacking if once else f"waiting: {lacking}")
                reported = lacking
            if once:
                return
            stop.wait(every_s)
