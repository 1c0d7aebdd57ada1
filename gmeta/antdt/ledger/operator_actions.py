"""What operators and the controller may do: requeue, skip, drain, and actions for the agents."""

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import ShardTable, find_table
from gmeta.antdt.model import MAX_ACTIONS, ShardState, Worker, argument_refusal

_REQUEUE_FROM = (ShardState.QUARANTINED, ShardState.SKIPPED)
_SKIP_FROM = (ShardState.READY, ShardState.DOING, ShardState.QUARANTINED)


def decide(state: LedgerState, command: cmd.Requeue | cmd.Skip | cmd.Drain) -> ev.Event:
    """Return the event of an operator's request. Raise RefusedError where it is not allowed now."""
    if isinstance(command, cmd.Drain):
        return _drain(state, command)
    table = find_table(state.tables, command.dataset)
    # Workers got END for it, and do not ask again.
    if table.finished:
        raise RefusedError(
            "FAILED_PRECONDITION",
            "WRONG_STATE",
            f"epoch {table.epoch} of dataset {command.dataset!r} is finished and workers were "
            "told so; its shards can no longer change. Do it in the next epoch.",
        )
    allowed = _REQUEUE_FROM if isinstance(command, cmd.Requeue) else _SKIP_FROM
    # Each shard once: one that is named twice would be counted as changed twice.
    positions = [_position(table, index, allowed) for index in dict.fromkeys(command.shard_indices)]
    if isinstance(command, cmd.Requeue):
        return ev.ShardsRequeued(command.request_id, command.dataset, positions)
    return ev.ShardsSkipped(command.request_id, command.dataset, positions, command.reason)


def _position(table: ShardTable, index: int, allowed: tuple[ShardState, ...]) -> int:
    if index >= table.spec.num_shards:
        raise RefusedError(
            "NOT_FOUND",
            "UNKNOWN_SHARD",
            f"shard {index} does not exist; dataset {table.spec.name!r} has shards 0 to "
            f"{table.spec.num_shards - 1}. List them with 'gmeta shards ls'.",
        )
    position = table.order.position_of(index)
    state = table.state_of(position)
    if state not in allowed:
        raise RefusedError(
            "FAILED_PRECONDITION",
            "WRONG_STATE",
            f"shard {index} of dataset {table.spec.name!r} is {state.display_name}; allowed is "
            f"{', '.join(s.display_name for s in allowed)}. Nothing was changed. List shards with "
            "'gmeta shards ls'.",
        )
    return position


def _drain(state: LedgerState, command: cmd.Drain) -> ev.DrainSet:
    if command.worker_id and command.worker_id not in state.workers:
        raise RefusedError(
            "NOT_FOUND",
            "NOT_REGISTERED",
            f"worker {command.worker_id!r} is unknown; registered: "
            f"{', '.join(sorted(state.workers)[:20]) or 'none'}. See them all with: gmeta shards "
            "status",
        )
    return ev.DrainSet(command.request_id, command.worker_id, not command.undo)


_ADJUST_BS = 2  # of the proto


def action_for(action: ev.ActionPosted, worker_id: str) -> cmd.PostAction | None:
    """Return the action as this worker's agent gets it, None where it is not concerned."""
    if action.worker_id:
        return cmd.PostAction(*action) if action.worker_id == worker_id else None
    parameters = action.parameters
    if action.kind == _ADJUST_BS:
        if worker_id not in parameters:
            return None
        micro_batches = parameters.get(f"micro:{worker_id}", 1.0)
        parameters = {"tasks": parameters[worker_id], "micro_batches": micro_batches}
    return cmd.PostAction(
        worker_id, action.action_id, action.kind, action.apply_at_step, parameters
    )


def is_new_action(state: LedgerState, command: cmd.PostAction) -> bool:
    """Return False when the action id was used before. Raise RefusedError at the limit."""
    # Answered ones count too: the controller posts again what it has had no reply to.
    if command.action_id in state.actions or command.action_id in state.acked:
        return False
    if len(state.actions) >= MAX_ACTIONS:
        raise argument_refusal(
            f"{len(state.actions)} actions are open; at most {MAX_ACTIONS} are allowed. Wait."
        )
    return True


def check_ack(state: LedgerState, worker: Worker, action_id: str) -> None:
    """Raise RefusedError unless the action is open and this worker's."""
    action = state.actions.get(action_id)
    if action is None or action.worker_id not in ("", worker.worker_id):
        raise RefusedError(
            "NOT_FOUND",
            "UNKNOWN_ACTION",
            f"action {action_id!r} is not open for worker {worker.worker_id!r}. "
            "Acknowledge only actions that a heartbeat brought.",
        )
