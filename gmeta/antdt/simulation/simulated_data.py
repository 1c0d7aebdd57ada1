"""The job's tasks in simulated workers' hands: every shard goes through the real ledger.

Shape suffix: W ranks or workers"""

from collections import deque
from typing import final

import numpy as np
from numpy.typing import NDArray

from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger.ledger import Ledger
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.model import MAX_SHARDS_PER_LEASE_CALL, Caller, DatasetSpec

Ints = NDArray[np.int64]
DATASET = "simulated"
# The leases' ttl: nothing here renews them, and a slow worker's must not expire.
FOR_EVER_S = 1e12


@final
class SimulatedData:
    """Leases, completes and hands back for all workers; one call at a time, no sockets."""

    def __init__(
        self, num_tasks: int, tasks_per_shard: int, num_workers: int, speculative: bool = False
    ) -> None:
        self.ledger = Ledger(LedgerState("simulated"), FOR_EVER_S)
        self.ledger.apply(cmd.StartService(1, "simulated"), 0.0)
        spec = DatasetSpec(
            DATASET, num_tasks, tasks_per_shard, shuffle=False, speculative=speculative
        )
        self.ledger.apply(cmd.RegisterDataset(spec), 0.0)
        self._spec = spec
        self._callers = [self._register(worker, 0) for worker in range(num_workers)]
        self._seqs = [0] * num_workers
        # (token, tasks of the shard, tasks done when it was granted) in the order of training
        self._held: list[deque[tuple[int, int, int]]] = [deque() for _ in range(num_workers)]
        self._left_W = np.zeros(num_workers, dtype=np.int64)  # tasks in all held shards
        self._first_left_W = np.zeros(num_workers, dtype=np.int64)  # tasks in the first one

    def _register(self, worker: int, process: int) -> Caller:
        name, incarnation = f"w{worker}", f"p{process}"
        reply = self.ledger.apply(cmd.Register(name, incarnation, None), 0.0).reply
        assert isinstance(reply, cmd.RegisterReply)
        return Caller(name, incarnation, reply.service_epoch, reply.run_generation)

    @property
    def finished(self) -> bool:
        """Return whether every shard is done."""
        return self.ledger.state.tables[DATASET].finished

    def take_step(self, wanted_W: Ints, now_s: float) -> Ints:
        """Return up to `wanted_W` tasks for each worker's next step."""
        # They count once `finish_step` is called; fewer where the data runs out.
        for worker in np.flatnonzero(self._left_W < wanted_W).tolist():
            self._lease(worker, int(wanted_W[worker] - self._left_W[worker]), now_s)
        return np.minimum(wanted_W, self._left_W)

    def finish_step(self, tasks_W: Ints, now_s: float) -> None:
        """Put the tasks into the model; complete the shards that are through."""
        self._left_W -= tasks_W
        self._first_left_W -= tasks_W
        for worker in np.flatnonzero((self._first_left_W <= 0) & (tasks_W > 0)).tolist():
            self._complete(worker, now_s)

    def take_for(self, worker: int, num_tasks: int, now_s: float) -> int:
        """Return up to `num_tasks` tasks for one worker."""
        if self._left_W[worker] < num_tasks:
            self._lease(worker, num_tasks - int(self._left_W[worker]), now_s)
        return min(num_tasks, int(self._left_W[worker]))

    def finish_of(self, worker: int, num_tasks: int, now_s: float) -> None:
        """Put one worker's tasks into the model."""
        self._left_W[worker] -= num_tasks
        self._first_left_W[worker] -= num_tasks
        if self._first_left_W[worker] <= 0:
            self._complete(worker, now_s)

    def restart(self, worker: int, process: int, now_s: float) -> None:
        """Start a new process of the worker."""
        # The old process's shards go back, with their offsets.
        held = self._held[worker]
        if held:
            token, num_tasks, _ = held[0]
            items = ((token, num_tasks - int(self._first_left_W[worker])),)
            self.ledger.apply(cmd.ReportProgress(self._callers[worker], items), now_s)
        held.clear()
        self._left_W[worker] = self._first_left_W[worker] = 0
        self._callers[worker] = self._register(worker, process)
        self._seqs[worker] = 0

    def _lease(self, worker: int, num_tasks: int, now_s: float) -> None:
        missing = -(-num_tasks // self._spec.units_per_shard)
        max_shards = min(missing, MAX_SHARDS_PER_LEASE_CALL)
        self._seqs[worker] += 1
        command = cmd.LeaseShards(self._callers[worker], self._seqs[worker], DATASET, 0, max_shards)
        reply = self.ledger.apply(command, now_s).reply
        if not isinstance(reply, cmd.GrantReply):
            return
        held = self._held[worker]
        if not held:
            self._first_left_W[worker] = reply.grants[0].num_units - reply.grants[0].units_done
        for grant in reply.grants:
            held.append((grant.token, grant.num_units, grant.units_done))
            self._left_W[worker] += grant.num_units - grant.units_done

    def _complete(self, worker: int, now_s: float) -> None:
        held = self._held[worker]
        through = []
        while held and self._first_left_W[worker] <= 0:
            through.append(held.popleft()[0])
            if held:
                # Below 0 by the tasks of the step that belong to the next shard.
                self._first_left_W[worker] += held[0][1] - held[0][2]
        self._seqs[worker] += 1
        command = cmd.Complete(self._callers[worker], self._seqs[worker], tuple(through))
        self.ledger.apply(command, now_s)
