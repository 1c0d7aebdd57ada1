"""Which calls belong to the past. Every mutation of a worker passes here before anything else."""

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.model import MAX_WORKERS, Caller, Worker


def check_process(state: LedgerState, caller: Caller) -> Worker:
    """Return the worker that calls. Raise RefusedError by service epoch and incarnation."""
    worker = state.workers.get(caller.worker_id)
    if worker is None:
        raise RefusedError(
            "FAILED_PRECONDITION",
            "NOT_REGISTERED",
            f"worker {caller.worker_id!r} is unknown to this service; only registered workers may "
            "call. Call Register.",
        )
    # Before the service epoch: a zombie must stop, not register again and take the id back.
    if caller.incarnation != worker.incarnation:
        raise superseded_refusal(caller.worker_id, caller.incarnation, worker.incarnation)
    if caller.service_epoch != state.service_epoch:
        raise RefusedError(
            "ABORTED",
            "FENCED_SERVICE_EPOCH",
            f"the call carries service epoch {caller.service_epoch}, the service is at "
            f"{state.service_epoch}: it was "
            "restarted. Call Register with the same incarnation, then repeat the call.",
        )
    return worker


def check_caller(state: LedgerState, caller: Caller) -> Worker:
    """Return the worker that calls. Raise RefusedError by all fences but the tokens."""
    # Tokens are checked later, item by item: one that is gone must not refuse the others.
    worker = check_process(state, caller)
    if caller.run_generation != state.generation:
        raise stale_generation_refusal(caller.worker_id, caller.run_generation, state.generation)
    return worker


def check_registration(
    state: LedgerState, worker_id: str, incarnation: str, rdzv_round: int | None
) -> None:
    """Raise RefusedError unless this process may speak for `worker_id` in this round."""
    worker = state.workers.get(worker_id)
    if worker is None:
        if len(state.workers) >= MAX_WORKERS:
            raise RefusedError(
                "RESOURCE_EXHAUSTED",
                "LIMIT",
                f"{len(state.workers)} worker ids are known; at most {MAX_WORKERS} are allowed. "
                "Reuse ids: one a rank.",
            )
    # A retired process that registers anew would fence the one that replaced it.
    elif incarnation in worker.retired:
        raise superseded_refusal(worker_id, incarnation, worker.incarnation)
    # A process from before a restart of the job, which names no newer round.
    elif (
        incarnation == worker.incarnation
        and worker.generation < state.generation
        and rdzv_round is None
    ):
        raise stale_generation_refusal(worker_id, worker.generation, state.generation)
    if rdzv_round is not None and rdzv_round < state.rdzv_round:
        raise RefusedError(
            "ABORTED",
            "FENCED_GENERATION",
            f"worker {worker_id!r} comes from rendezvous round {rdzv_round}, the job is in round "
            f"{state.rdzv_round}. This process was left behind: stop it.",
        )


def superseded_refusal(worker_id: str, incarnation: str, current: str) -> RefusedError:
    """Return the refusal of a process whose worker id another process has taken over."""
    return RefusedError(
        "ABORTED",
        "FENCED_INCARNATION",
        f"process {incarnation!r} of worker {worker_id!r} was replaced by {current!r}; one "
        "process speaks for a worker. Stop this process, or give it a worker id of its own.",
    )


def stale_generation_refusal(worker_id: str, generation: int, current: int) -> RefusedError:
    """Return the refusal of a process from before a restart of the job."""
    return RefusedError(
        "ABORTED",
        "FENCED_GENERATION",
        f"worker {worker_id!r} is of generation {generation}, the job is at {current}: it was "
        "restarted or rolled back. Stop this process; the restarted job has its own.",
    )
