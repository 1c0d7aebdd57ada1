"""`gmeta shards ...`: look into a running data-shard service, operate it, audit checkpoints."""

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from gmeta.access.address import DEFAULT_ADDRESS
from gmeta.access.errors import AntdtError
from gmeta.antdt.manifests.audit import audit_manifest, check_descends
from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.antdt.model import MAX_SHARDS
from gmeta.cli.commands import shard_caller as caller
from gmeta.cli.commands.console import make_console, show_table
from gmeta.errors import UserError
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

shards = typer.Typer(
    help="Look into and operate a running data-shard service; audit checkpoints offline.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]
DatasetName = Annotated[
    str, typer.Option("--dataset", help="dataset; may be left out when there is only one")
]
ShardArguments = Annotated[
    list[int],
    typer.Argument(min=0, max=MAX_SHARDS - 1, help="shard numbers, as `gmeta shards ls` shows"),
]


@shards.command()
def status(
    address: caller.Address = DEFAULT_ADDRESS,
    token_file: caller.TokenFile = None,
    tls_ca: caller.TlsCa = None,
    tls_cert: caller.TlsCert = None,
    tls_key: caller.TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Show datasets, workers and checkpoints at a glance."""
    call = caller.make_caller(address, token_file, tls_ca, tls_cert, tls_key)
    answer = call("Status", pb.StatusRequest())
    if as_json:
        return typer.echo(json.dumps(_to_dict(answer), indent=2))
    console = make_console()
    state = "draining" if answer.draining else "serving"
    console.print(
        f"job {answer.job}: {state}, generation {answer.run_generation}, service epoch "
        f"{answer.service_epoch}, {answer.ledger_events} ledger events"
    )
    names = (
        *("dataset", "epoch", "shards", "todo", "doing", "done", "in checkpoint", "skipped"),
        "quarantined",
    )
    rows = [
        (
            d.spec.name,
            # Counted from 1, as in the trainers' lines and on the live page.
            d.epoch + 1,
            d.num_shards,
            d.todo,
            d.doing,
            d.done_open + d.done_committed,
            d.done_committed,
            d.skipped,
            d.quarantined,
        )
        for d in answer.datasets
    ]
    _print_table(console, names, rows)
    workers = [
        (
            w.worker_id,
            w.num_leases,
            f"{w.silent_ms / 1000:.1f} s ago" if w.HasField("silent_ms") else "not since start",
            w.draining or "",
        )
        for w in answer.workers
    ]
    _print_table(console, ("worker", "leases", "last call", "draining"), workers)
    if answer.num_workers > len(workers):
        console.print(f"{answer.num_workers} workers; these are the first {len(workers)} by name")
    saved = [
        (c.checkpoint_id, c.step, "yes" if c.committed else "prepared") for c in answer.checkpoints
    ]
    _print_table(console, ("checkpoint", "step", "committed"), saved)
    return None


@shards.command("ls")
def list_shards(
    address: caller.Address = DEFAULT_ADDRESS,
    dataset: DatasetName = "",
    state: Annotated[
        str,
        typer.Option(help="only todo, doing, done_open, done_committed, skipped or quarantined"),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="show at most so many")] = 100,
    token_file: caller.TokenFile = None,
    tls_ca: caller.TlsCa = None,
    tls_cert: caller.TlsCert = None,
    tls_key: caller.TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """List shards with their state, offset, attempts and holder."""
    # Without SHARD_STATE_UNSPECIFIED, which is 0: in a request it stands for all states.
    numbers = {
        name.removeprefix("SHARD_STATE_").lower(): n for name, n in pb.ShardState.items() if n
    }
    if state and state.lower() not in numbers:
        raise typer.BadParameter(f"{state!r} is no shard state; known are {', '.join(numbers)}")
    call = caller.make_caller(address, token_file, tls_ca, tls_cert, tls_key)
    name = _only_dataset(call, dataset)
    listed: list[Any] = []
    page_token = ""
    while len(listed) < limit:
        # The service's pages have at most 1000 shards.
        page = {"page_size": min(1000, limit - len(listed)), "page_token": page_token}
        number = numbers.get(state.lower(), 0)
        answer = call("ListShards", pb.ListShardsRequest(dataset=name, state=number, **page))
        listed.extend(answer.shards)
        page_token = answer.next_page_token
        if not page_token:
            break
    if as_json:
        return typer.echo(json.dumps([_to_dict(shard) for shard in listed], indent=2))
    names = ("shard", "state", "units", "trained", "attempts", "worker", "note")
    rows = [
        (
            s.shard_index,
            pb.ShardState.Name(s.state).removeprefix("SHARD_STATE_").lower(),
            f"{s.start_unit}..{s.start_unit + s.num_units - 1}",
            s.units_done,
            s.attempts,
            f"{s.worker_id} + {s.backup_worker_id}" if s.backup_worker_id else s.worker_id,
            s.note,
        )
        for s in listed
    ]
    _print_table(make_console(), names, rows)
    if page_token:
        typer.echo(f"more follow; this is --limit {limit}")
    return None


@shards.command()
def audit(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoint folder, or its shards.json")],
    previous: Annotated[
        Path | None,
        typer.Option(help="an earlier checkpoint of the run: check that this one continues it"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove, offline, what a checkpoint has been trained on: every unit once, none twice. Exit
    code 1 when not ok."""
    manifest = load_manifest(checkpoint)
    report = audit_manifest(manifest)
    if previous is not None:
        check_descends(manifest, load_manifest(previous))
    if as_json:
        typer.echo(json.dumps({"ok": report.ok, "lines": report.lines}, indent=2))
    else:
        typer.echo("\n".join(report.lines))
    if not report.ok:
        raise typer.Exit(1)


@shards.command()
def requeue(
    numbers: ShardArguments,
    address: caller.Address = DEFAULT_ADDRESS,
    dataset: DatasetName = "",
    token_file: caller.TokenFile = None,
    tls_ca: caller.TlsCa = None,
    tls_cert: caller.TlsCert = None,
    tls_key: caller.TlsKey = None,
) -> None:
    """Offer quarantined or skipped shards again, with a clean count of attempts."""
    call = caller.make_caller(address, token_file, tls_ca, tls_cert, tls_key)
    name = _only_dataset(call, dataset)
    # One id for all attempts of the call: repeated after a lost answer, it changes nothing twice.
    request = pb.RequeueRequest(request_id=uuid.uuid4().hex, dataset=name, shard_indices=numbers)
    typer.echo(f"shards of {name} offered again: {call('Requeue', request).num_changed}")


@shards.command()
def skip(
    numbers: ShardArguments,
    reason: Annotated[str, typer.Option(help="why; kept in the ledger and in every checkpoint")],
    address: caller.Address = DEFAULT_ADDRESS,
    dataset: DatasetName = "",
    token_file: caller.TokenFile = None,
    tls_ca: caller.TlsCa = None,
    tls_cert: caller.TlsCert = None,
    tls_key: caller.TlsKey = None,
) -> None:
    """Leave shards out of this epoch, on the record."""
    call = caller.make_caller(address, token_file, tls_ca, tls_cert, tls_key)
    name = _only_dataset(call, dataset)
    request = pb.SkipRequest(
        request_id=uuid.uuid4().hex, dataset=name, shard_indices=numbers, reason=reason
    )
    typer.echo(f"shards of {name} skipped: {call('Skip', request).num_changed}")


@shards.command()
def drain(
    worker: Annotated[str, typer.Option(help="only this worker; its shards go back at once")] = "",
    undo: Annotated[bool, typer.Option("--undo", help="hand out shards again")] = False,
    address: caller.Address = DEFAULT_ADDRESS,
    token_file: caller.TokenFile = None,
    tls_ca: caller.TlsCa = None,
    tls_cert: caller.TlsCert = None,
    tls_key: caller.TlsKey = None,
) -> None:
    """Hand out no more shards: to one worker, or to nobody."""
    request = pb.DrainRequest(request_id=uuid.uuid4().hex, worker_id=worker, undo=undo)
    answer = caller.make_caller(address, token_file, tls_ca, tls_cert, tls_key)("Drain", request)
    who = f"worker {worker}" if worker else "the service"
    typer.echo(
        f"{who} {'hands out again' if undo else 'is draining'}; shards that went back: "
        f"{answer.num_released}"
    )


class DatasetChoiceError(AntdtError, UserError):
    """The command line does not say which dataset it is about."""


def _only_dataset(call: caller.Call, dataset: str) -> str:
    if dataset:
        return dataset
    names = [d.spec.name for d in call("Status", pb.StatusRequest()).datasets]
    if not names:
        raise DatasetChoiceError(
            "the service has no dataset yet: a job registers its own when it starts. Start the "
            "job, or look at another --service."
        )
    if len(names) > 1:
        raise DatasetChoiceError(
            f"the service has {len(names)} datasets, {', '.join(names)}; a command is about one. "
            "Pass --dataset NAME."
        )
    return str(names[0])


def _print_table(console: Console, names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if rows:
        table = Table(*names, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        show_table(console, table)


def _to_dict(message: Any) -> Any:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
