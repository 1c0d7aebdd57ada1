"""The live page: what it is fed, who may see it, and that a real browser draws it."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gmeta.antdt.dashboard
from gmeta.antdt.dashboard import Dashboard, _newest_decisions
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.metric_readings import MetricReading
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig, WorkerHealth
from gmeta.antdt.rpc import operator_views as views
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.antdt.stragglers.governor import Governor
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from tests.antdt.driver import FakeClock, Service
from tests.support.browser import needs_browser, open_browser
from tests.support.waiting import PATIENCE_S, wait_until

NODE = shutil.which("node")
SHARE = 16
WINDOW_S = 0.05
RUN = {"status": "training", "folder": "/runs/<a>", "total_steps": 2400, "wall_s": 1e9}


class FakeJob:
    """Four workers of a real service; rank3 is four times slower from the sixth window on."""

    def __init__(self, server: ShardServer) -> None:
        self.server = server
        self.ask = server.edge.ask
        self.clock = server.governor._clock = FakeClock(time.monotonic() + 2 * WINDOW_S)
        self.ask(cmd.RegisterDataset(DatasetSpec("train", 64_000, 16, seed=1)))
        self.callers = [self.register(f"rank{i}") for i in range(4)]
        self.totals = [(0, 0, 0.0, 0.0, 0.0, 0.0) for _ in self.callers]
        self.seqs = [0] * 4
        for rank in range(4):
            self.beat(rank)
        server.governor.tick()

    def register(self, name: str) -> Caller:
        reply = self.ask(cmd.Register(name, "p", None))
        return Caller(name, "p", reply.service_epoch, reply.run_generation)

    def beat(self, rank: int) -> None:
        report = (*self.totals[rank], SHARE)
        self.ask(cmd.Heartbeat(self.callers[rank], (), report))

    def window(self, slow: bool) -> None:
        for rank, caller in enumerate(self.callers):
            step, tasks, compute, wait, own, peers = self.totals[rank]
            ms = 40.0 if slow and rank == 3 else 10.0
            self.totals[rank] = (
                step + 10, tasks + 160, compute + 160 * ms, wait + 90, own, peers + 160 * (50 - ms)
            )  # fmt: skip
            self.seqs[rank] += 1
            granted = self.ask(cmd.LeaseShards(caller, self.seqs[rank], "train", 0, 12))
            self.seqs[rank] += 1
            tokens = tuple(grant.token for grant in granted.grants[:10])
            self.ask(cmd.Complete(caller, self.seqs[rank], tokens))
            self.beat(rank)
        self.clock.advance(2 * WINDOW_S)
        self.server.governor.tick()

    def run(self) -> None:
        for number in range(24):
            self.window(slow=number >= 6)
            if number in (8, 16):
                prepared = self.ask(cmd.PrepareCheckpoint(self.callers[0], f"step-{number}0", 1))
                self.ask(cmd.CommitCheckpoint(self.callers[0], f"step-{number}0", prepared.digest))
        readings = [
            MetricReading(step, {"loss": 1.0 / step, "samples_per_s": 9.0}, 1e9 + step)
            for step in (40, 80)
        ]
        readings += [MetricReading(80, {"valid/auc": 0.75})]
        self.ask(cmd.Heartbeat(self.callers[0], (), (*self.totals[0], SHARE), tuple(readings)))
        self.score()

    def score(self) -> None:
        """rank0 does the last shard of rank3 too."""
        self.ask(cmd.RegisterDataset(DatasetSpec("scores", 8, 8, speculative=True)))
        for rank in (3, 0):
            self.seqs[rank] += 1
            self.ask(cmd.LeaseShards(self.callers[rank], self.seqs[rank], "scores", 0, 1))
            self.ask(cmd.BackUp("1.1.99", "rank3"))


@pytest.fixture(scope="module")
def server() -> Iterator[ShardServer]:
    watched = StragglerConfig(
        MonitorConfig(window_s=WINDOW_S), ControllerConfig(policy="nd", cooldown_s=0.3)
    )
    config = ServiceConfig(
        "127.0.0.1:0",
        job="ctr-model",
        metrics_listen="127.0.0.1:0",
        stragglers=watched,
        lease_ttl_s=3600.0,  # longer than a browser may take
    )
    server = ShardServer(config)
    server.governor.stop()  # ticked by hand
    FakeJob(server).run()
    yield server
    server.stop(0.0)


def url(server: ShardServer, path: str = "/") -> str:
    return f"http://127.0.0.1:{server.metrics_port}{path}"


def first_event(server: ShardServer) -> Any:
    seen: list[Any] = []

    def look() -> bool:
        # The page of a test before this one counts as open until the server next writes to it.
        try:
            with urllib.request.urlopen(url(server, "/events"), timeout=PATIENCE_S) as stream:
                seen.append(json.loads(stream.readline().decode().removeprefix("data: ")))
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        return bool(seen)

    wait_until(look, "an event", pause_s=0.1)
    return seen[0]


def test_the_stream_tells_shards_workers_actions_checkpoints_audit(server: ShardServer) -> None:
    seen = first_event(server)
    dataset, scores = seen["datasets"]
    assert (dataset["backed_up"], scores["backed_up"]) == ([], [[0, "rank3", "rank0"]])
    assert dataset["done_open"] + dataset["done_committed"] == 24 * 4 * 10
    assert dataset["done_committed"] > 0
    slowest = seen["workers"][0]
    expected = ("rank3", "transient", "compute")
    assert (slowest["name"], slowest["verdict"], slowest["cause"]) == expected
    assert slowest["evidence"].startswith("3.84 times the others' time per task")
    assert len(slowest["speeds"]) == 24
    assert seen["decisions"][-1]["kind"] == "ADJUST_BS"
    assert "rank3 (transient, compute)" in seen["decisions"][-1]["reason"]
    assert [c["id"] for c in seen["checkpoints"]] == ["step-160", "step-80"]
    assert seen["audit"]["ok"]
    assert seen["curves"] == {
        "loss": [[40, 1 / 40, 1e9 + 40], [80, 1 / 80, 1e9 + 80]],
        "valid/auc": [[80, 0.75, 1e9 + 80]],
    }


def test_a_path_that_is_none_gets_an_answer(server: ShardServer) -> None:
    with socket.create_connection(("127.0.0.1", server.metrics_port), timeout=PATIENCE_S) as link:
        link.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.0 400 ")


def test_head_of_the_stream_ends_behind_its_headers(server: ShardServer) -> None:
    with socket.create_connection(("127.0.0.1", server.metrics_port), PATIENCE_S) as caller:
        caller.sendall(b"HEAD /events HTTP/1.0\r\n\r\n")
        with caller.makefile("rb") as answer:
            text = answer.read()  # to its end
    assert b"text/event-stream" in text
    assert text.endswith(b"\r\n\r\n")


def test_decisions_may_be_added_while_the_page_reads_them() -> None:
    spoken: deque[Any] = deque(maxlen=50)

    class Said:
        def _asdict(self) -> dict[str, Any]:
            spoken.append(self)  # as the governor's thread does between two of them
            return {}

    spoken.extend(Said() for _ in range(3))
    assert _newest_decisions(spoken) == [{}, {}, {}]


def test_the_page_asks_nobody_else_for_anything(server: ShardServer) -> None:
    with urllib.request.urlopen(url(server)) as answer:
        page = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    outside = page.replace('"http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert "http://" not in outside
    assert "https://" not in outside
    assert "innerHTML" not in page


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_browser_draws_the_page(server: ShardServer, width: int, height: int) -> None:
    with open_browser() as browser:
        browser.resize(width, height)
        browser.open(url(server))
        browser.wait_for("#data", "shard 0 is with rank3, and with rank0 as backup")
        assert browser.text("#job") == "Job ctr-model"
        assert "transient: compute" in browser.text("#workers tbody")
        assert "every unit accounted for" in browser.text("#audit")
        assert "shared the tasks of a step anew" in browser.text("#decisions")
        assert browser.text("#trouble") == ""
        assert browser.overflow() == 0
        assert browser.faults() == []


@pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        (
            {},
            [
                "1 silent", "workers heard of 3 of 4", "silent for 7 min", "2 older",
                "shared the tasks of a step anew",
            ],
        ),
        ({"num_silent": 0}, ["1 slow"]),
        ({"num_silent": 0, "num_stragglers": 0}, ["running"]),
        (
            {"phase": "waiting", "workers": [], "num_workers": 0, "datasets": [], "decisions": []},
            ["waiting for workers", "No worker has come yet", "none has registered yet"],
        ),
        ({"phase": "gone", "tasks_per_s": 0.0}, ["no worker is heard of", "look at the trainers"]),
        (
            {"phase": "ended", "tasks_per_s": 0.0},
            ["ended", "Everything is trained", "last step 240", "last loss 0.0125"],
        ),
        (
            {"phase": "ended", "run": RUN | {"status": "finished"}},
            [
                "The run is finished", "from the first reading to the last 40 s",
                "last validation auc 0.7500", "Run /runs/<a>, 2,400 steps in all; its report comes "
                "with gmeta evaluate /runs/<a>", "0.0125 to 0.0250",
            ],
        ),
        (
            {"phase": "gone", "run": RUN | {"status": "stopped"}},
            ["the run stopped", "said so at step 240", "gmeta train --resume"],
        ),
        ({"run": RUN}, ["since the run began", "gmeta inspect /runs/<a>"]),
        ({"slow_ratio": 4.0}, ["3.84was above 4"]),
        ({"job_left_s": 7200.0}, ["left of this epoch; of all epochs 2.0 h"]),
        ({"job_left_s": None}, ["left of this epoch; nobody said how many come"]),
        ({}, ["rank3: 16", "a line with a number", "1. shared", "7. shared"]),
        ({"num_silent": 0, "draining": True}, ["draining", "until gmeta shards drain --undo"]),
        (
            {},
            [
                "loss 0.0125", "0.0125 to 0.0250, step 40 to 80", "validation auc 0.7500",
                "at step 80",
            ],
        ),
        ({"curves": {"loss": [[1, 0.5], [2, None]]}}, ["loss not a number"]),
        ({"curves": {}}, ["loss and validation come with the trainer\u2019s first reading"]),
        ({"trouble": "the store is full"}, ["the store is full"]),
    ],
)  # fmt: skip
def test_the_page_says_what_the_job_is_doing(
    server: ShardServer, changed: dict[str, Any], shown: list[str]
) -> None:
    state = first_event(server)
    state["workers"][-1] |= {"verdict": "silent", "silent_s": 400.0}
    state["decisions"] = 7 * state["decisions"][:1]
    state |= {"num_silent": 1, "num_stragglers": 1, **changed}
    page = Path(gmeta.antdt.dashboard.__file__).with_name("page.html")
    assert NODE is not None
    drawn = subprocess.run(
        [NODE, str(Path(__file__).with_name("page_in_node.js")), str(page)],
        input=json.dumps(state), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr[-500:]
    for text in shown:
        assert text in drawn.stdout, drawn.stdout


def test_the_grafana_dashboard_asks_for_metrics_that_exist(server: ShardServer) -> None:
    with urllib.request.urlopen(url(server, "/metrics")) as answer:
        served = set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), flags=re.MULTILINE))
    path = Path(__file__).parents[3] / "deploy" / "grafana" / "antdt.json"
    asked = set(re.findall(r"antdt_\w+", path.read_text()))
    names = {name.removesuffix("_bucket") for name in asked}
    assert names - served == set()


def test_of_more_workers_than_a_status_holds_the_slow_ones_are_shown_and_nobody_of_the_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service()
    service.worker("gone-with-the-first-round")
    for number in range(4):
        service.worker(f"rank{number}", rdzv_round=1)

    def ask(request: Any) -> Any:
        (answer,) = service.committer.commit([request])
        return answer

    governor = Governor(StragglerConfig(), ask, clock=service.clock)
    governor.tick()
    governor.monitor.health["rank3"] = WorkerHealth("rank3", "transient", "compute", 4.0)
    monkeypatch.setattr(views, "MAX_WORKERS_SHOWN", 2)
    document = Dashboard(ask, governor).document()
    assert [row["name"] for row in document["workers"]] == ["rank3", "rank0"]
    assert (document["num_workers"], document["num_stragglers"]) == (4, 1)
