"""Method: kill -9 of the real service under 16 clients, on its real store. Each client keeps its
own history; the oracle compares it with what the service knows in the end. 24 kills by default;
ANTDT_KILLS sets another number."""

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.lease import EndOfEpoch, WaitFor
from gmeta.antdt.manifests.shard_manifest import parse_manifest
from gmeta.antdt.model import DatasetSpec
from gmeta.antdt.storage.sqlite_store import SqliteStore
from tests.antdt.faults.service_process import ServiceProcess
from tests.support.waiting import PATIENCE_S, wait_until

NUM_CLIENTS = 16
NUM_KILLS = int(os.environ.get("ANTDT_KILLS", "24"))


class Client(threading.Thread):
    """Leases, works, completes; notes what was acknowledged and nothing else."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.address = address
        self.number = number
        self.completed: list[tuple[int, int]] = []  # (epoch, shard), acknowledged
        self.tokens: list[int] = []  # of all that it was granted
        self.epochs = 0
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        rng = random.Random(self.number)
        try:
            with ShardClient(self.address, f"w{self.number}", outage_budget_s=PATIENCE_S) as client:
                while not self.stopping.is_set():
                    self.work(client, rng)
        except BaseException as error:
            self.error = error
            raise

    def work(self, client: ShardClient, rng: random.Random) -> None:
        answer = client.lease("d", self.epochs, rng.randint(1, 3))
        if isinstance(answer, EndOfEpoch):
            self.epochs += 1
        elif isinstance(answer, WaitFor):
            time.sleep(answer.retry_after_s / 4)
        else:
            self.tokens += [lease.token for lease in answer]
            for lease in answer:
                lease.advance(rng.randint(0, lease.num_units - lease.units_done))
            client.flush()
            for lease in answer:
                lease.advance(lease.num_units - lease.units_done)
            client.flush()
            self.completed += [(lease.epoch, lease.shard_index) for lease in answer]


def num_completed(clients: list[Client]) -> int:
    return sum(len(client.completed) for client in clients)


@pytest.mark.timeout(1800)
def test_no_kill_of_the_service_loses_or_doubles_a_shard(tmp_path: Path) -> None:
    rng = random.Random(1)
    # A slow machine is no reason to lose a lease: it may serve for a tenth of the time.
    service = ServiceProcess(tmp_path / "s.db", lease_ttl_s=PATIENCE_S).start()
    service.wait_until_serving()
    spec = DatasetSpec("d", 300, 3, num_epochs=1_000_000)
    with ShardClient(service.address, "setup") as setup:
        setup.register_dataset(spec)
    clients = [Client(service.address, number) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for kill in range(NUM_KILLS):
        # A slow machine then kills as much work as a fast one; the other kills come whether or not
        # the clients got anywhere.
        if kill % 4 == 0:
            before = num_completed(clients)
            wait_until(lambda: num_completed(clients) > before, "a shard completed")  # noqa: B023
        # Some long after the start, most while clients are still coming back.
        time.sleep(rng.uniform(0.02, 0.15) if kill % 4 == 0 else rng.uniform(0.0, 0.04))
        service.kill()
        service.start()
        service.wait_until_serving()
    for client in clients:
        client.stopping.set()
    for client in clients:
        client.join(PATIENCE_S)
    assert [client.error for client in clients] == [None] * NUM_CLIENTS
    with ShardClient(service.address, "oracle") as oracle:
        manifest = oracle.prepare_checkpoint("final", 1)
    # Before the snapshot of an orderly end, which takes the log's place.
    service.kill()
    check_log(tmp_path / "s.db", NUM_KILLS)
    service.start()
    service.wait_until_serving()
    assert service.terminate() == 0
    tokens = [token for client in clients for token in client.tokens]
    assert len(tokens) == len(set(tokens)), "a token was granted twice"
    acknowledged = [item for client in clients for item in client.completed]
    assert len(acknowledged) == len(set(acknowledged)), "a shard was completed twice in one epoch"
    (entry,) = manifest.datasets
    every = {(epoch, shard) for epoch in range(entry.epoch) for shard in range(spec.num_shards)}
    finished_before = {item for item in acknowledged if item[0] < entry.epoch}
    assert finished_before == every, "an epoch ended with a shard that nobody completed"
    assert entry.num_done == len(acknowledged) - len(finished_before)
    assert parse_manifest(manifest.to_json()) == manifest


def check_log(path: Path, num_kills: int) -> None:
    """The ledger as it lies on the disk: one start a kill, no token granted twice."""
    store = SqliteStore(path)
    snapshot, batches = store.load()
    store.close()
    records = [record for batch in batches for record in batch.records]
    # Of what a snapshot covers there is no record any more; each start counted its epoch up.
    num_before = json.loads(snapshot.document)["service_epoch"] if snapshot else 0
    num_starts = sum(record.startswith(b'["start"') for record in records)
    assert num_before + num_starts == num_kills + 1
    firsts = [json.loads(record)[6] for record in records if record.startswith(b'["grant"')]
    assert len(firsts) == len(set(firsts))
