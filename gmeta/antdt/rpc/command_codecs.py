"""Commands from protobuf and replies to protobuf. Every value from outside is checked here, once:
an invalid one is a RefusedError, and nothing else in the service doubts a command."""

import re
from collections.abc import Callable
from typing import Any

import grpc

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.metric_readings import (
    MAX_FOLDER_CHARS,
    MAX_READINGS_PER_CALL,
    MAX_VALUES,
    MAX_WALL_S,
    MetricReading,
    RunReport,
)
from gmeta.antdt.model import (
    MAX_EPOCHS,
    MAX_ITEMS_PER_CALL,
    MAX_NAME_CHARS,
    MAX_NOTE_CHARS,
    MAX_OPERATOR_SHARDS,
    MAX_SHARDS_PER_LEASE_CALL,
    Caller,
    argument_refusal,
    check_name,
    check_range,
    check_text,
)
from gmeta.antdt.rpc.proto_types import encode_grant, parse_spec
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

MAX_REPORTED_MS = 1e15  # 30,000 years
# Includes the one-character codes of ISO 6429, and Unicode's line ends.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def encode_refusal(error: RefusedError) -> Any:
    """Return the proto of a refusal on a stream."""
    # The value of a gRPC status is (number, name in words).
    code, _ = getattr(grpc.StatusCode, error.code).value
    return pb.Refusal(code=code, reason=f"REASON_{error.reason}", message=str(error))


def parse_caller(message: Any) -> Caller:
    """Return who calls. Raise RefusedError."""
    # Only the length is checked: names are compared with registered ones.
    check_text("worker_id", message.worker_id, MAX_NAME_CHARS)
    check_text("incarnation", message.incarnation, MAX_NAME_CHARS)
    return Caller(
        message.worker_id, message.incarnation, message.service_epoch, message.run_generation
    )


def _clean_text(text: str) -> str:
    """Return free text for ledger and logs: without control characters, cut to its bound."""
    return _CONTROL.sub(" ", text)[:MAX_NOTE_CHARS]


def _items(what: str, values: Any, high: int = MAX_ITEMS_PER_CALL, low: int = 0) -> tuple[int, ...]:
    if not low <= len(values) <= high:
        raise argument_refusal(
            f"{what} has {len(values)} entries; allowed are {low} to {high}. Split the call."
        )
    return tuple(values)


def _register_dataset(request: Any) -> cmd.Command:
    return cmd.RegisterDataset(parse_spec(request.spec))


def _register(request: Any) -> cmd.Command:
    check_name("worker_id", request.worker_id)
    check_name("incarnation", request.incarnation)
    rdzv_round = request.rdzv_round if request.HasField("rdzv_round") else None
    return cmd.Register(request.worker_id, request.incarnation, rdzv_round)


def _lease(request: Any) -> cmd.Command:
    check_range("max_shards", request.max_shards, 1, MAX_SHARDS_PER_LEASE_CALL)
    check_range("epoch", request.epoch, 0, MAX_EPOCHS)
    check_text("dataset", request.dataset, MAX_NAME_CHARS)
    caller = parse_caller(request.caller)
    return cmd.LeaseShards(caller, request.seq, request.dataset, request.epoch, request.max_shards)


def _heartbeat(request: Any) -> cmd.Command:
    report: tuple[float, ...] = ()
    if request.HasField("report"):
        r = request.report
        times = (r.compute_ms, r.data_wait_ms, r.communication_ms, r.peer_wait_ms)
        # One infinity would stay in the sums of the monitor for all of its long windows.
        if not all(0 <= ms <= MAX_REPORTED_MS for ms in times):
            raise argument_refusal(
                f"the report's times are {times} ms; allowed are finite numbers from 0 to "
                f"{MAX_REPORTED_MS:.0e}. Correct it."
            )
        # In nanoseconds: neither a sum nor a ratio of such numbers leaves the range of a float.
        report = (r.step, r.tasks_done, *(round(ms, 6) for ms in times), r.share)
    _items("readings", request.readings, MAX_READINGS_PER_CALL)
    return cmd.Heartbeat(
        parse_caller(request.caller),
        _items("tokens", request.tokens),
        report,
        tuple(map(_reading, request.readings)),
        _run_report(request.run) if request.HasField("run") else None,
    )


def _reading(message: Any) -> MetricReading:
    _items("values", message.values, MAX_VALUES)
    for name in message.values:
        check_text("the name of a value", name, MAX_NAME_CHARS)
    return MetricReading(message.step, dict(message.values), _wall_s(message))


def _run_report(message: Any) -> RunReport:
    check_text("the run's folder", message.folder, MAX_FOLDER_CHARS)
    known = message.status in pb.RunReport.Status.values()  # an open enum: any number can come
    status = pb.RunReport.Status.Name(message.status) if known else ""
    name = status.removeprefix("STATUS_").lower()
    return RunReport(name, message.folder, message.total_steps, _wall_s(message))


def _wall_s(message: Any) -> float:
    # By another machine's clock, for people alone: what is no time is none.
    return message.wall_s if 0 < message.wall_s < MAX_WALL_S else 0.0


def _progress(request: Any) -> cmd.Command:
    _items("items", request.items)
    items = tuple((item.token, item.units_done) for item in request.items)
    return cmd.ReportProgress(parse_caller(request.caller), items)


def _give_back_parser(kind: type[cmd.Complete | cmd.Release]) -> Callable[[Any], cmd.Command]:
    return lambda request: kind(
        parse_caller(request.caller), request.seq, _items("tokens", request.tokens)
    )


def _fail(request: Any) -> cmd.Command:
    check_text("failure_class", request.failure_class, MAX_NAME_CHARS)
    return cmd.Fail(
        parse_caller(request.caller),
        request.seq,
        request.token,
        _clean_text(request.failure_class) or "unspecified",
        _clean_text(request.message),
    )


def _prepare(request: Any) -> cmd.Command:
    check_name("checkpoint_id", request.checkpoint_id)
    return cmd.PrepareCheckpoint(parse_caller(request.caller), request.checkpoint_id, request.step)


def _commit(request: Any) -> cmd.Command:
    check_name("checkpoint_id", request.checkpoint_id)
    return cmd.CommitCheckpoint(
        parse_caller(request.caller), request.checkpoint_id, request.digest[:MAX_NAME_CHARS]
    )


def _restore(request: Any) -> cmd.Command:
    check_name("restore_id", request.restore_id)
    # A manifest that is no UTF-8 does not match its digest, and is refused like an altered one.
    text = request.manifest_json.decode(errors="replace")
    return cmd.Restore(parse_caller(request.caller), text, request.restore_id)


def _ack_action(request: Any) -> cmd.Command:
    check_name("action_id", request.action_id)
    check_range("result", request.result, 1, 3)
    caller = parse_caller(request.caller)
    return cmd.AckAction(caller, request.action_id, request.result, _clean_text(request.message))


def _requeue(request: Any) -> cmd.Command:
    check_name("request_id", request.request_id)
    shards = _items("shard_indices", request.shard_indices, MAX_OPERATOR_SHARDS, 1)
    return cmd.Requeue(request.request_id, request.dataset, shards)


def _skip(request: Any) -> cmd.Command:
    check_name("request_id", request.request_id)
    reason = _clean_text(request.reason).strip()
    if not reason:
        raise argument_refusal(
            "the reason is empty; a skipped shard is data that the model never sees, and needs "
            "one. Say why: gmeta shards skip SHARD --reason TEXT."
        )
    shards = _items("shard_indices", request.shard_indices, MAX_OPERATOR_SHARDS, 1)
    return cmd.Skip(request.request_id, request.dataset, shards, reason)


def _drain(request: Any) -> cmd.Command:
    check_name("request_id", request.request_id)
    check_text("worker_id", request.worker_id, MAX_NAME_CHARS)
    return cmd.Drain(request.request_id, request.worker_id, request.undo)


def _encode_registration(reply: cmd.RegisterReply, ttl_ms: int) -> Any:
    return pb.RegisterResponse(
        service_epoch=reply.service_epoch,
        run_generation=reply.run_generation,
        lease_ttl_ms=ttl_ms,
        last_seq=reply.last_seq,
        leases=map(encode_grant, reply.leases),
    )


def _encode_lease(reply: cmd.GrantReply | cmd.Wait | cmd.End, ttl_ms: int) -> Any:
    if isinstance(reply, cmd.GrantReply):
        grants = pb.Grants(grants=map(encode_grant, reply.grants), lease_ttl_ms=ttl_ms)
        return pb.LeaseResponse(last_seq=reply.last_seq, grants=grants)
    if isinstance(reply, cmd.End):
        return pb.LeaseResponse(last_seq=reply.last_seq, end=pb.End())
    wait = pb.Wait(cause=reply.cause, retry_after_ms=reply.retry_after_ms, message=reply.message)
    return pb.LeaseResponse(last_seq=reply.last_seq, wait=wait)


def _encode_heartbeat(reply: cmd.HeartbeatReply, ttl_ms: int) -> Any:
    fields = [action._asdict() for action in reply.actions]
    for action in fields:
        del action["worker_id"]  # the worker knows its own id
    actions = [pb.Action(**action) for action in fields]
    return pb.HeartbeatResponse(lease_ttl_ms=ttl_ms, revoked_tokens=reply.revoked, actions=actions)


def _outcomes_encoder(kind: Any) -> Callable[[cmd.Outcomes, int], Any]:
    return lambda reply, _: kind(last_seq=reply.last_seq, outcomes=reply.outcomes)


def _encode_failure(reply: cmd.Outcomes, ttl_ms: int) -> Any:
    return pb.FailResponse(
        last_seq=reply.last_seq, outcome=reply.outcomes[0], quarantined=reply.quarantined
    )


def _encode_manifest(reply: cmd.ManifestReply, ttl_ms: int) -> Any:
    return pb.PrepareCheckpointResponse(
        manifest_json=reply.manifest_json.encode(), digest=reply.digest
    )


# RPC -> (request to command, reply and lease ttl to response)
CODECS: dict[str, tuple[Callable[[Any], cmd.Command], Callable[[Any, int], Any]]] = {
    "RegisterDataset": (
        _register_dataset,
        lambda reply, _: pb.RegisterDatasetResponse(**reply._asdict()),
    ),
    "Register": (_register, _encode_registration),
    "Lease": (_lease, _encode_lease),
    "Heartbeat": (_heartbeat, _encode_heartbeat),
    "Progress": (_progress, lambda reply, _: pb.ProgressResponse(outcomes=reply.outcomes)),
    "Complete": (_give_back_parser(cmd.Complete), _outcomes_encoder(pb.CompleteResponse)),
    "Release": (_give_back_parser(cmd.Release), _outcomes_encoder(pb.ReleaseResponse)),
    "Fail": (_fail, _encode_failure),
    "PrepareCheckpoint": (_prepare, _encode_manifest),
    "CommitCheckpoint": (_commit, lambda reply, _: pb.CommitCheckpointResponse()),
    "Restore": (_restore, lambda reply, _: pb.RestoreResponse(**reply._asdict())),
    "AckAction": (_ack_action, lambda reply, _: pb.AckActionResponse(outcome=reply.outcomes[0])),
    "Requeue": (_requeue, lambda reply, _: pb.RequeueResponse(num_changed=reply.num_changed)),
    "Skip": (_skip, lambda reply, _: pb.SkipResponse(num_changed=reply.num_changed)),
    "Drain": (_drain, lambda reply, _: pb.DrainResponse(num_released=reply.num_changed)),
}
