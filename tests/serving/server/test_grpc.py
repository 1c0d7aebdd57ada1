"""The protocol over gRPC: its messages are the published ones, its answers those of HTTP."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from gmeta.access.auth import Tokens
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server.access import ServerAccess
from gmeta.serving.server.grpc_service import InferenceGuard, _parse_request, inference_handler
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.request_errors import RequestError, bad_request
from gmeta.serving.server.server_limits import BatchLimits
from gmeta_protos.inference.v2 import open_inference_pb2 as pb
from gmeta_protos.inference.v2 import open_inference_pb2_grpc as pb_grpc
from tests.serving.server.serving import request_of, service_of
from tests.serving.server.test_http import make_tokens
from tests.serving.server.test_published import RPCS
from tests.support.exported import random_rows

T = TypeVar("T")
QUERY = random_rows(6, seed=2)
SUPPORT = random_rows(9, seed=1)


def with_stub(service: InferenceService, work: Callable[[Any], Awaitable[T]]) -> T:
    """What `work` returns, with a stub of a server of this service."""

    async def run() -> T:
        server = grpc.aio.server(interceptors=[InferenceGuard(service, certificates=False)])
        server.add_generic_rpc_handlers((inference_handler(service),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = pb_grpc.GRPCInferenceServiceStub(channel)
                stub.channel = channel
                return await work(stub)
        finally:
            await server.stop(None)

    return asyncio.run(run())


def message(request: dict[str, Any], raw: bool = False) -> Any:
    """An inference request of HTTP as a ModelInferRequest."""
    found = pb.ModelInferRequest(model_name="model", id=request.get("id", ""))
    for name, value in request.get("parameters", {}).items():
        found.parameters[name].string_param = value
    for each in request["inputs"]:
        added = found.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
        is_float = each["datatype"] == "FP64"
        if raw:
            array = np.array(each["data"], np.float64 if is_float else np.int64)
            found.raw_input_contents.append(array.tobytes())
        else:
            field = added.contents.fp64_contents if is_float else added.contents.int64_contents
            field.extend(each["data"])
    found.outputs.extend(
        pb.ModelInferRequest.InferRequestedOutputTensor(name=each["name"])
        for each in request.get("outputs", ())
    )
    return found


def infer(service: InferenceService, request: Any, **options: Any) -> Any:
    return with_stub(service, lambda stub: stub.ModelInfer(request, **options))


def values(response: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(response.raw_output_contents[0], "<f4")


@pytest.mark.parametrize("raw", [False, True])
def test_a_task_adapts_and_stays(service: InferenceService, model: ServedModel, raw: bool) -> None:
    expected = model.adapt(SUPPORT).predict(QUERY).numpy()
    stored = infer(service, message(request_of(QUERY, SUPPORT, key="u"), raw))
    hit = infer(service, message(request_of(QUERY, key="u") | {"id": "9"}, raw))
    for response in (stored, hit):
        np.testing.assert_allclose(values(response), expected, rtol=0, atol=1e-6)
        assert response.model_version == service.loaded.version
        assert response.parameters["support_rows"].int64_param == 9
    assert hit.id == "9"
    assert hit.parameters["task_cache"].string_param == "hit"
    assert (hit.outputs[0].name, list(hit.outputs[0].shape)) == ("prediction", [6])


def test_what_is_wrong_is_a_status_and_a_line(service: InferenceService) -> None:
    unknown = message(request_of(QUERY, key="nobody"))
    other = message(request_of(QUERY))
    other.model_name = "other"
    both = message(request_of(QUERY), raw=True)
    both.inputs[0].contents.int64_contents.append(1)
    uneven = message(request_of(QUERY), raw=True)
    del uneven.raw_input_contents[0]
    empty = message(request_of(QUERY))
    empty.inputs.add(name="support.tags", datatype="INT64", shape=[2**31 - 1, 0])
    for request, code, told in (
        (empty, "INVALID_ARGUMENT", "the request has 2147483647 rows of both sides; at most "),
        (unknown, "NOT_FOUND", "task 'nobody' is not in the cache: "),
        (other, "NOT_FOUND", "model 'other' is not served here; model is. Correct it"),
        (both, "INVALID_ARGUMENT", "input 'item' has contents beside raw_input_contents; "),
        (uneven, "INVALID_ARGUMENT", "raw_input_contents has 6 entries and inputs 7; both need"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            infer(service, request)
        assert caught.value.code().name == code
        assert caught.value.details().startswith(told)


def test_metadata_as_the_protocol_has_it(service: InferenceService) -> None:
    async def ask(stub: Any) -> tuple[Any, ...]:
        return (
            await stub.ServerLive(pb.ServerLiveRequest()),
            await stub.ServerReady(pb.ServerReadyRequest()),
            await stub.ModelReady(pb.ModelReadyRequest(name="model")),
            await stub.ServerMetadata(pb.ServerMetadataRequest()),
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="model")),
        )

    live, ready, model_ready, server, metadata = with_stub(service, ask)
    assert (live.live, ready.ready, model_ready.ready) == (True, True, True)
    assert server.name == "gmeta"
    assert metadata.versions == [service.loaded.version]
    assert {each.name: list(each.shape) for each in metadata.inputs}["tags"] == [-1, -1]


def test_a_full_server_says_when_to_come_back(exported: Path) -> None:
    with service_of(exported, batch=BatchLimits(waiting=0)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            infer(service, message(request_of(QUERY)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(tuple(caught.value.trailing_metadata()))
        assert trailing["grpc-retry-pushback-ms"] == "1000"


def test_a_caller_who_leaves_is_no_failure_of_the_server(exported: Path) -> None:
    with service_of(exported, batch=BatchLimits(inline_s=-1.0)) as service:
        run, count = service._batcher._run, service.metrics.registry.get_sample_value

        async def leave(stub: Any) -> None:
            released, loop = asyncio.Event(), asyncio.get_running_loop()

            def held(requests: Any) -> Any:
                asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
                return run(requests)

            service._batcher._run = held
            call = stub.ModelInfer(message(request_of(QUERY)))
            while count("gmeta_serve_batch_tasks_count") != 1:
                await asyncio.sleep(0.005)
            call.cancel()
            while not answered(service):
                await asyncio.sleep(0.005)
            released.set()

        with_stub(service, leave)
        assert answered(service) == {("grpc", "499"): 1.0}


def answered(service: InferenceService) -> dict[tuple[str, str], float]:
    """How many requests were answered, by protocol and status."""
    return {
        (sample.labels["protocol"], sample.labels["status"]): sample.value
        for metric in service.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "gmeta_serve_requests_total"
    }


def test_a_token_has_a_role(exported: Path, tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "tokens")
    codes = {}
    with service_of(exported, ServerAccess(Tokens(tmp_path / "tokens"), False)) as service:
        for role, token in {**tokens, "nobody": "x"}.items():
            metadata = (("authorization", f"Bearer {token}"),)
            try:
                infer(service, message(request_of(QUERY)), metadata=metadata)
                codes[role] = "OK"
            except grpc.aio.AioRpcError as error:
                codes[role] = error.code().name
        live = with_stub(service, lambda stub: stub.ServerLive(pb.ServerLiveRequest()))
        statuses = {"200": 2.0, "401": 1.0, "403": 1.0}
        assert answered(service) == {("grpc", status): n for status, n in statuses.items()}
    assert live.live
    assert codes == {
        "worker": "OK", "operator": "OK", "viewer": "PERMISSION_DENIED",
        "nobody": "UNAUTHENTICATED",
    }  # fmt: skip


def test_calls_without_a_proof_take_no_place_of_those_with_one(
    exported: Path, tmp_path: Path
) -> None:
    """Calls whose message never comes: refused by their token alone, or ended by later probes."""
    tokens = make_tokens(tmp_path / "tokens")
    access = ServerAccess(Tokens(tmp_path / "tokens"), False)

    async def ask(stub: Any) -> list[str]:
        def open_calls(name: str, count: int) -> list[Any]:
            method = stub.channel.stream_unary(f"/inference.GRPCInferenceService/{name}")
            return [method() for _ in range(count)]

        strangers = open_calls("ModelInfer", 40) + open_calls("ModelMetadata", 40)
        codes = {(await each.code()).name for each in strangers}
        probes = open_calls("ServerReady", 20)
        while sum(each.done() for each in probes) < 12:  # all but the newest end
            await asyncio.sleep(0.005)
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        metadata = (("authorization", f"Bearer {tokens['worker']}"),)
        answer = await stub.ModelInfer(message(request_of(QUERY)), metadata=metadata)
        assert len(values(answer)) == QUERY.num_rows
        for each in probes:
            each.cancel()
        return sorted(codes)

    with service_of(exported, access, max_connections=8) as service:
        assert with_stub(service, ask) == ["UNAUTHENTICATED"]


def described(module: Any) -> tuple[Any, dict[str, Any]]:
    """The calls of the protocol and their messages, by the names that travel."""
    messages: dict[str, Any] = {}

    def describe(message: Descriptor) -> str:
        name = str(message.full_name).removeprefix("gmeta.")
        if name not in messages:
            messages[name] = fields = []
            for field in message.fields:
                oneof = field.containing_oneof.name if field.containing_oneof else ""
                inner = describe(field.message_type) if field.message_type else ""
                repeated = field.is_repeated
                fields.append((field.name, field.number, field.type, repeated, oneof, inner))
        return name

    methods = module.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    calls = [(name, methods[name].input_type, methods[name].output_type) for name in RPCS]
    return [(name, describe(sent), describe(received)) for name, sent, received in calls], messages


def test_messages_are_those_of_a_published_client() -> None:
    triton = pytest.importorskip("tritonclient.grpc", reason="a development dependency")
    calls, messages = described(pb)
    assert (calls, messages) == described(triton.service_pb2)
    assert "inference.ModelInferRequest" in messages


@pytest.mark.parametrize("is_message", [True, False])
def test_a_refused_request_is_let_go_of_at_once(is_message: bool) -> None:
    """gRPC keeps what a call was aborted with in a cycle: only a full collection ends it."""

    class Content:
        pass

    class Request:
        DESCRIPTOR = SimpleNamespace(full_name="a request")

        @classmethod
        def FromString(cls, content: Content) -> "Request":
            if not is_message:
                raise DecodeError("cut short")
            seen.append(weakref.ref(request := cls()))
            return request

    class Context:
        aborted: Exception

        async def abort(self, code: grpc.StatusCode, told: str) -> None:
            self.aborted = grpc.aio.AbortError(told)
            raise self.aborted

    async def respond(request: Request, context: Context) -> None:
        try:
            raise bad_request("of a request")
        except RequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    content, context = Content(), Context()
    seen: list[weakref.ref[Any]] = [weakref.ref(content)]
    call = _parse_request(Request, respond)(content, context)  # type: ignore[arg-type]
    del content
    with pytest.raises(grpc.aio.AbortError, match="a request"):
        asyncio.run(call)  # type: ignore[arg-type]
    assert [one() for one in seen] == [None] * (1 + is_message)
