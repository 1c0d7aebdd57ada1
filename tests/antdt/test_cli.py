"""`gmeta shards ...` and offline audits, as an operator types them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gmeta.access.errors import AntdtError
from gmeta.antdt import DatasetSpec, ShardClient
from gmeta.antdt.errors import ManifestError, ServiceUnavailableError
from gmeta.antdt.manifests.audit import check_descends
from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.antdt.rpc import operator_views as views
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.cli.commands import shard_caller
from gmeta.cli.commands.shards import shards
from tests.antdt.faults.service_process import free_port
from tests.support.refusals import catch_message


@pytest.fixture
def server() -> Iterator[ShardServer]:
    made = ShardServer(ServiceConfig("127.0.0.1:0", job="movies"))
    yield made
    made.stop(0.0)


@pytest.fixture
def client(server: ShardServer) -> Iterator[ShardClient]:
    with ShardClient(server.address, "rank0") as made:
        made.register_dataset(DatasetSpec("train", 10, 4, shuffle=False, max_attempts=1))
        yield made


def run(server: ShardServer | None, *arguments: str) -> str:
    service = ["--service", server.address] if server else []
    result = CliRunner().invoke(shards, [*arguments, *service], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def quarantine(client: ShardClient) -> int:
    for _ in range(2):
        (lease,) = client.lease("train", 0)
        client.fail(lease, "corrupt-page", "page 3")
    return lease.shard_index


def test_ls_shows_state_offset_holder_and_failure(server: ShardServer, client: ShardClient) -> None:
    shard = quarantine(client)
    (lease,) = client.lease("train", 0)
    lease.advance(1)
    client.flush()
    rows = json.loads(run(server, "ls", "--json"))
    shown = [
        (int(r["shard_index"]), r["state"], r["units_done"], r["worker_id"], r["note"])
        for r in rows
    ]
    assert shown == [
        (shard, "SHARD_STATE_QUARANTINED", "0", "", "corrupt-page: page 3"),
        (lease.shard_index, "SHARD_STATE_DOING", "1", "rank0", ""),
        (2, "SHARD_STATE_TODO", "0", "", ""),
    ]
    assert "corrupt-page: page 3" in run(server, "ls", "--state", "quarantined")
    assert "more follow; this is --limit 1" in run(server, "ls", "--limit", "1")


def test_ls_shows_a_note_with_brackets_as_it_is(server: ShardServer, client: ShardClient) -> None:
    (lease,) = client.lease("train", 0)
    client.fail(lease, "gone", "no file [/data/x] [red]")
    assert "gone: no file [/data/x] [red]" in run(server, "ls")


def test_a_quarantined_shard_is_requeued_or_skipped_with_a_reason(
    server: ShardServer, client: ShardClient
) -> None:
    shard = quarantine(client)
    assert run(server, "requeue", str(shard)) == "shards of train offered again: 1\n"
    quarantine(client)
    skipped = run(server, "skip", str(shard), "--reason", "page 3 is lost")
    assert skipped == "shards of train skipped: 1\n"
    for lease in client.shards("train"):
        assert lease.shard_index != shard
    status = json.loads(run(server, "status", "--json"))
    assert (status["job"], status["datasets"][0]["skipped"]) == ("movies", "1")
    assert "movies: serving" in run(server, "status")


def test_status_says_of_how_many_workers_it_shows_the_first(
    server: ShardServer, client: ShardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "workers;" not in run(server, "status")
    monkeypatch.setattr(views, "MAX_WORKERS_SHOWN", 1)
    with ShardClient(server.address, "rank1"):
        assert "2 workers; these are the first 1 by name" in run(server, "status")


def test_with_no_service_an_operator_hears_how_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_caller, "OPERATOR_BUDGET_S", 0.1)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ServiceUnavailableError) as raised:
        CliRunner().invoke(shards, ["status", "--service", address], catch_exceptions=False)
    told = str(raised.value)
    assert told.startswith(f"no shard service answered at {address}: ")
    assert told.endswith(
        ". Start it, or name another by --service HOST:PORT or GMETA_SHARD_SERVICE; a job's own "
        "stands in RUN/shards/address."
    )


def test_drain_and_undo(server: ShardServer, client: ShardClient) -> None:
    client.lease("train", 0)
    drained = run(server, "drain", "--worker", "rank0")
    assert drained == "worker rank0 is draining; shards that went back: 1\n"
    assert run(server, "drain") == "the service is draining; shards that went back: 0\n"
    found = run(server, "drain", "--undo")
    assert found == "the service hands out again; shards that went back: 0\n"


def test_an_operator_command_without_a_dataset_name_asks_for_one(server: ShardServer) -> None:
    assert catch_message(AntdtError, run, server, "requeue", "1") == (
        "the service has no dataset yet: a job registers its own when it starts. Start the job, "
        "or look at another --service."
    )


def test_a_command_about_two_datasets_asks_which(server: ShardServer, client: ShardClient) -> None:
    client.register_dataset(DatasetSpec("valid", 10, 4))
    assert catch_message(AntdtError, run, server, "requeue", "1") == (
        "the service has 2 datasets, train, valid; a command is about one. Pass --dataset NAME."
    )


def test_ls_says_when_it_leaves_shards_out(server: ShardServer, client: ShardClient) -> None:
    shown = run(server, "ls", "--limit", "2").splitlines()
    assert shown[-1] == "more follow; this is --limit 2"
    assert len(shown) == len(run(server, "ls").splitlines())  # one shard less, one line more


def checkpoint(client: ShardClient, folder: Path, name: str) -> Path:
    client.flush()
    path = folder / name
    path.mkdir()
    client.prepare_checkpoint(name, 3).save(path)
    return path


def test_audit_accounts_for_every_unit_offline(client: ShardClient, tmp_path: Path) -> None:
    first, second = client.lease("train", 0, 2)
    first.advance(4)
    second.advance(1)
    path = checkpoint(client, tmp_path, "c1")
    manifest = load_manifest(path)
    assert run(None, "audit", str(path)).splitlines() == [
        "checkpoint c1 of job movies: step 3, generation 1",
        f"digest {manifest.digest} matches; parent none",
        f"ledger: {manifest.ledger_events} events, head {manifest.ledger_head}",
        "dataset train (10 units in 3 shards, fingerprint none), epoch 1 of 1:",
        "  5 units in the model exactly once (1 whole shards, 1 in part)",
        "  5 units still to train",
        "OK: no unit is in the model twice",
    ]


def test_audit_is_not_ok_with_quarantined_shards(client: ShardClient, tmp_path: Path) -> None:
    quarantine(client)
    path = checkpoint(client, tmp_path, "c1")
    result = CliRunner().invoke(shards, ["audit", str(path)])
    assert result.exit_code == 1
    found = result.output.splitlines()[-1]
    assert found == "NOT OK: dataset train: 1 quarantined shards wait for an operator"


def test_audit_tells_a_checkpoint_of_another_lineage(client: ShardClient, tmp_path: Path) -> None:
    (lease,) = client.lease("train", 0)
    lease.advance(4)
    older = checkpoint(client, tmp_path, "c1")
    client.restore(None)
    newer = checkpoint(client, tmp_path, "c2")
    check_descends(load_manifest(older), load_manifest(newer))
    with pytest.raises(ManifestError) as strange:
        CliRunner().invoke(
            shards, ["audit", str(newer), "--previous", str(older)], catch_exceptions=False
        )
    assert str(strange.value) == (
        "checkpoint c2 does not continue c1: dataset train went back. The two belong to different "
        "lineages: compare checkpoints of one run, the older one second."
    )


def test_a_checkpoint_without_manifest_is_explained(tmp_path: Path) -> None:
    assert catch_message(ManifestError, load_manifest, tmp_path) == (
        f"{tmp_path / 'shards.json'} does not exist: a checkpoint tied to the shard service holds "
        "a file shards.json. Name the checkpoint folder, or a run trained with the data service."
    )
