"""Method: a history checker. Raw calls over a link that delays and cuts, many of them sent twice,
to a service that is killed between; each call is noted with the times at which it began and ended.
Judged afterwards, by the times alone, is whether one order of the calls explains every answer."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc
from tests.antdt.faults.service_process import running
from tests.antdt.faults.test_network import Proxy
from tests.support.waiting import PATIENCE_S, wait_until

NUM_SHARDS = 60
NEVER_S = float("inf")
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Noted(NamedTuple):
    """One call as its caller saw it; `end_s` is NEVER_S where no answer came."""

    what: str  # grant, complete, release or end
    shard: int
    token: int
    begin_s: float
    end_s: float = NEVER_S


class Worker:
    """Leases, completes, now and then releases; tries a call again until there is an answer."""

    def __init__(self, name: str, proxied: Any, direct: Any, history: list[Noted]) -> None:
        self.name, self.stubs, self.history = name, (proxied, direct), history
        self.draw = random.Random(name)
        self.held: dict[int, int] = {}  # token -> shard
        self.register()

    def register(self) -> None:
        request = pb.RegisterRequest(worker_id=self.name, incarnation="p")
        reply = self.call("Register", request)
        self.caller = pb.Caller(
            worker_id=self.name,
            incarnation="p",
            service_epoch=reply.service_epoch,
            run_generation=reply.run_generation,
        )
        self.seq = reply.last_seq
        # Grants whose answer was lost are told here.
        self.held = {lease.token: lease.shard_index for lease in reply.leases}

    def call(self, rpc: str, message: Any) -> Any:
        """The answer, the first of two where the call is doubled; None after a restart."""
        while True:
            first, second = (getattr(stub, rpc) for stub in self.stubs)
            doubled = second.future(message, timeout=20) if self.draw.random() < 0.3 else None
            try:
                answer = first(message, timeout=20)
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
                if code is grpc.StatusCode.ABORTED:  # fenced: the service has started again
                    return None
                if code not in _AGAIN:
                    raise
                continue
            if doubled is not None and doubled.exception() is None:
                assert doubled.result() == answer, "a call that is sent twice has one answer"
            return answer

    def numbered(self, rpc: str, message: Any) -> tuple[Any, float, float]:
        """A numbered call's answer with its times; None where a restart came in between."""
        message.caller.CopyFrom(self.caller)
        message.seq = self.seq + 1
        begin_s = time.monotonic()
        answer = self.call(rpc, message)
        if answer is None:
            self.register()
            return None, begin_s, NEVER_S
        self.seq = answer.last_seq
        return answer, begin_s, time.monotonic()

    def run(self) -> None:
        while True:
            request = pb.LeaseRequest(dataset="d", max_shards=2)
            answer, begin_s, end_s = self.numbered("Lease", request)
            if answer is not None and answer.HasField("end"):
                self.history.append(Noted("end", -1, -1, begin_s, end_s))
                return
            if answer is not None:
                self.held |= {x.token: x.shard_index for x in answer.grants.grants}
            # A grant that only the registration after a restart told of was answered by then.
            now_s = time.monotonic()
            self.history += [Noted("grant", s, t, begin_s, now_s) for t, s in self.held.items()]
            time.sleep(0.002)
            if self.held:
                self.give_back()

    def give_back(self) -> None:
        """Ends what is held; after a restart the next registration tells what was given back."""
        before = self.held
        what = "release" if self.draw.random() < 0.1 else "complete"
        kind = {"release": pb.ReleaseRequest, "complete": pb.CompleteRequest}[what]
        answer, begin_s, end_s = self.numbered(what.capitalize(), kind(tokens=before))
        if answer is not None:
            assert list(answer.outcomes) == [pb.OUTCOME_ACCEPTED] * len(before)
            self.held = {}
        for token, shard in before.items():
            if token not in self.held:
                self.history.append(Noted(what, shard, token, begin_s, end_s))


def judge(history: list[Noted], num_shards: int) -> None:
    """Raises AssertionError where no order of the calls explains the answers."""
    shard_of: dict[int, int] = {}
    for each in history:
        assert shard_of.setdefault(each.token, each.shard) == each.shard, "a token of two shards"
    for shard in range(num_shards):
        mine = [each for each in history if each.shard == shard]
        completed = [each for each in mine if each.what == "complete"]
        assert len(completed) == 1, f"shard {shard} was completed {len(completed)} times"
        (done,) = completed
        held = []  # (from, to): the least time for which each token held it
        for token in {each.token for each in mine}:
            granted_s = min(e.end_s for e in mine if e.token == token and e.what == "grant")
            ended = [e.begin_s for e in mine if e.token == token and e.what != "grant"]
            assert ended, f"token {token} was given and never given back"
            assert granted_s <= ended[0], f"token {token} was given back before it was granted"
            held.append((granted_s, ended[0]))
        held.sort()
        assert all(left[1] <= right[0] for left, right in pairwise(held)), "in two hands at once"
        assert held[-1][1] == done.begin_s, f"shard {shard} was handed out after its completion"
        for end in (each for each in history if each.what == "end"):
            assert done.begin_s <= end.end_s, f"END came before shard {shard} was completed"


GOOD = [
    Noted("grant", 0, 7, 1, 2), Noted("release", 0, 7, 3, 4), Noted("grant", 0, 8, 3, 4),
    Noted("complete", 0, 8, 5, NEVER_S), Noted("end", -1, -1, 5, 6),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({0: Noted("grant", 1, 8, 1, 2)}, "a token of two shards"),
        ({1: Noted("complete", 0, 7, 3, 4)}, "shard 0 was completed 2 times"),
        ({3: Noted("release", 0, 8, 5, 6)}, "shard 0 was completed 0 times"),
        ({2: Noted("grant", 0, 8, 1, 2)}, "in two hands at once"),
        ({3: Noted("complete", 0, 8, 2, 3)}, "given back before it was granted"),
        (
            {1: Noted("complete", 0, 7, 3, 4), 3: Noted("release", 0, 8, 5, 6)},
            "handed out after its completion",
        ),
        ({4: Noted("end", -1, -1, 3, 4)}, "END came before"),
    ],
)
def test_the_checker_finds_a_history_that_cannot_be(changed: dict[int, Noted], found: str) -> None:
    judge(GOOD, 1)
    with pytest.raises(AssertionError, match=found):
        judge([changed.get(place, each) for place, each in enumerate(GOOD)], 1)


def stub_of(address: str, stack: ExitStack) -> Any:
    options = (
        # The least is also for how long a connection may be tried, through a proxy that has nobody
        # behind it while the service starts.
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.max_reconnect_backoff_ms", 100),
        ("grpc.use_local_subchannel_pool", 1),
    )
    return pb_grpc.ShardServiceStub(stack.enter_context(grpc.insecure_channel(address, options)))


def test_doubled_cut_and_interrupted_calls_have_an_order_that_explains_them(tmp_path: Path) -> None:
    history: list[Noted] = []
    draw = random.Random(7)
    with running(tmp_path / "s.db") as service, ExitStack() as stack:
        proxy = Proxy(service.port)
        stack.callback(proxy.close)
        spec = pb.DatasetSpec(name="d", num_units=NUM_SHARDS * 4, units_per_shard=4, num_epochs=1)
        direct = stub_of(service.address, stack)
        direct.RegisterDataset(pb.RegisterDatasetRequest(spec=spec))

        def work(name: str) -> None:
            Worker(name, stub_of(proxy.address, stack), direct, history).run()

        pool = stack.enter_context(ThreadPoolExecutor(4))
        workers = [pool.submit(work, f"w{number}") for number in range(4)]
        num_done = num_kills = 0

        def gets_on() -> bool:
            return len(history) > num_done or any(worker.done() for worker in workers)

        while not any(worker.done() for worker in workers):
            # By what was done, not by time: a slow machine must get on between two faults.
            num_done = len(history) + 5
            wait_until(gets_on, "5 more answers")
            proxy.delay_s = draw.choice([0.0, 0.0, 0.01])
            proxy.cut()
            if draw.random() < 0.2:
                num_kills += 1
                service.kill()
                service.start()
        for worker in workers:
            worker.result(PATIENCE_S)
    assert num_kills > 0
    judge(history, NUM_SHARDS)
