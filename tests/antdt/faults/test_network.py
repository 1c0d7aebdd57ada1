"""Method: a TCP proxy between client and service that cuts, delays and black-holes connections.
gRPC runs over TCP, so a lost or doubled *message* shows as a broken connection and a client retry;
doubled and lost calls themselves are in the simulation."""

import random
import socket
import threading
import time
from pathlib import Path

import pytest

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.lease import EndOfEpoch, WaitFor
from gmeta.antdt.errors import ServiceUnavailableError
from gmeta.antdt.model import DatasetSpec
from tests.antdt.faults.service_process import running
from tests.support.waiting import PATIENCE_S, wait_until


class Proxy:
    """Forwards bytes to `port`; can delay chunks, cut all connections, or swallow replies."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.delay_s = 0.0
        self.swallow_replies = False
        self.open = True
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self.open:
            try:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                continue
            self.pairs.append((client, server))
            for source, sink, is_reply in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._pump, args=(source, sink, is_reply), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(self.delay_s)
                if not (is_reply and self.swallow_replies):
                    sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()

    def cut(self) -> None:
        """Every connection is reset; calls under way may or may not have been applied."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def close(self) -> None:
        self.open = False
        self.listener.close()
        self.cut()


def test_a_link_that_breaks_and_stalls_completes_each_shard_once(tmp_path: Path) -> None:
    rng = random.Random(4)
    with running(tmp_path / "s.db") as service:
        proxy = Proxy(service.port)
        completed: list[int] = []
        done = threading.Event()

        def misbehave() -> None:
            while not done.wait(rng.uniform(0.05, 0.2)):
                if rng.random() < 0.3:  # else a slow machine has every connection cut as it opens
                    before = len(completed)
                    wait_until(lambda: done.is_set() or len(completed) > before)  # noqa: B023
                proxy.delay_s = rng.choice([0.0, 0.0, 0.02])
                proxy.swallow_replies = rng.random() < 0.3
                time.sleep(0.05)
                proxy.cut()
                proxy.swallow_replies = False

        def work(name: str) -> None:
            with ShardClient(proxy.address, name, outage_budget_s=PATIENCE_S) as client:
                while not isinstance(answer := client.lease("d", 0, 2), EndOfEpoch):
                    if isinstance(answer, WaitFor):
                        time.sleep(answer.retry_after_s)
                        continue
                    for lease in answer:
                        lease.advance(lease.num_units)
                    time.sleep(0.01)
                    client.flush()
                    completed.extend(lease.shard_index for lease in answer)

        with ShardClient(service.address, "setup") as setup:
            setup.register_dataset(DatasetSpec("d", 400, 4))
        chaos = threading.Thread(target=misbehave)
        workers = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(3)]
        for thread in (chaos, *workers):
            thread.start()
        for thread in workers:
            thread.join(PATIENCE_S)
        done.set()
        chaos.join()
        proxy.close()
    assert sorted(completed) == list(range(100))


def test_a_link_that_swallows_every_reply_is_an_outage(tmp_path: Path) -> None:
    with running(tmp_path / "s.db") as service:
        proxy = Proxy(service.port)
        client = ShardClient(proxy.address, "a")
        config = client._session.connection._config.__dict__
        config["call_timeout_s"], config["outage_budget_s"] = 0.3, 0.5
        proxy.swallow_replies = True
        with pytest.raises(ServiceUnavailableError) as outage:
            client.register_dataset(DatasetSpec("d", 4, 4))
        found = f"the shard service at {proxy.address} did not answer RegisterDataset for "
        assert found in str(outage.value)
        client.close()
        proxy.close()
