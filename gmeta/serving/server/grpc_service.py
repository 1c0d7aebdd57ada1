"""The server's gRPC side: the Open Inference Protocol's service, and gRPC's own health service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import grpc
from google.protobuf.message import DecodeError

from gmeta.access.auth import CallerCredentials
from gmeta.serving.server.access import Right
from gmeta.serving.server.inference_protocol import (
    InferenceAnswer,
    InferenceRequest,
    make_inference,
)
from gmeta.serving.server.input_columns import ModelColumns
from gmeta.serving.server.request_errors import RequestError, bad_request
from gmeta.serving.server.server_limits import RequestLimits
from gmeta.serving.server.tensors import check_head, raw_bytes, tensor_from_raw, tensor_from_typed
from gmeta_protos.inference.v2 import open_inference_pb2 as pb

if TYPE_CHECKING:
    from gmeta.serving.server.inference_service import InferenceService

# Our messages have a package of their own: in one process with another client of the protocol, both
# would have the same names. On the wire the protocol's names are used.
_OWN_PREFIX = "gmeta."
_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE_NAME = _SERVICE.full_name.removeprefix(_OWN_PREFIX)


def inference_handler(service: InferenceService, certificates: bool) -> Any:
    """Return the protocol's RPCs as a handler; `certificates`: the handshake demands them."""
    servicer = _InferenceServicer(service, certificates)
    handlers = {}
    for method in _SERVICE.methods:
        kinds = getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
        respond = _parse_request(kinds[0], getattr(servicer, method.name))
        # Parsed by our code: gRPC itself answers bad bytes with UNKNOWN and an exception's name.
        handlers[method.name] = grpc.unary_unary_rpc_method_handler(
            respond, request_deserializer=None, response_serializer=kinds[1].SerializeToString
        )
    return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)


class UnknownCalls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses in a line the calls that no handler before it knows: Triton's own, and typing errors,
    of which gRPC's own answer says only that a method was not found."""

    def service(self, details: Any) -> Any:
        """Return a handler that refuses the call, whatever is sent."""
        known = ", ".join(method.name for method in _SERVICE.methods)

        async def refuse(requests: Any, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                f"call {details.method!r:.80} is not answered; {SERVICE_NAME} has {known}. Call "
                "one of these",
            )

        # Of streams: a caller of any kind is refused before it has sent a message.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _parse_request(
    kind: Any, respond: Callable[[Any, Any], Awaitable[Any]]
) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def answer(content: bytes, context: Any) -> Any:
        try:
            try:
                request = kind.FromString(content)
            except DecodeError:
                name = kind.DESCRIPTOR.full_name.removeprefix(_OWN_PREFIX)
                message = f"the call's message is no {name}. Send one"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
            return await respond(request, context)
        except grpc.aio.AbortError as error:
            # gRPC keeps the error in a cycle with the call, and the frames of its traceback keep
            # the request, until a full collection: hundreds of megabytes of refused requests.
            error.__context__ = request = None
            del content
            raise error.with_traceback(None) from None

    return answer


@final
class _InferenceServicer:
    def __init__(self, service: InferenceService, certificates: bool) -> None:
        self._service = service
        self._certificates = certificates

    async def ServerLive(self, request: Any, context: Any) -> Any:
        # Probes carry no credentials: these three answers ask for none.
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._service.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        async with self._answering(context):
            self._service.check_model(request.name, request.version)
            return pb.ModelReadyResponse(ready=self._service.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        async with self._answering(context, Right.METADATA):
            # Its binary extension is one of HTTP.
            metadata = {**self._service.server_metadata(), "extensions": []}
            return pb.ServerMetadataResponse(**metadata)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        async with self._answering(context, Right.METADATA):
            self._service.check_model(request.name, request.version)
            metadata = self._service.model_metadata()
            # The message has no field for an output's parameters: its label and loss.
            kind, fields = pb.ModelMetadataResponse.TensorMetadata, ("name", "datatype", "shape")
            for side in ("inputs", "outputs"):
                tensors = metadata[side]
                metadata[side] = [kind(**{key: one[key] for key in fields}) for one in tensors]
            return pb.ModelMetadataResponse(**metadata)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        # No right here: `infer` checks it, so that a refused call is counted and logged too.
        async with self._answering(context):
            inference, answer = await self._service.infer(
                "grpc",
                request.model_name,
                request.model_version,
                dict(context.invocation_metadata() or ()),
                context.peer(),
                lambda: self._check(context, Right.INFER),
                partial(_read_request, request, self._service),
            )
            return _encode_response(self._service.config.name, inference, answer)

    def _check(self, context: Any, right: Right) -> None:
        caller = CallerCredentials.from_context(context)
        uris = caller.uris if self._certificates else None
        self._service.access.check(right, caller.authorization, uris, caller.valid_until_s)

    @asynccontextmanager
    async def _answering(self, context: Any, right: Right | None = None) -> AsyncIterator[None]:
        """Check the caller's right; in the block, a RequestError becomes the call's status."""
        try:
            if right is not None:
                self._check(context, right)
            yield
        except RequestError as error:
            if error.retry_after_s is not None:
                # What gRPC's own retries obey.
                pushback = ("grpc-retry-pushback-ms", str(error.retry_after_s * 1000))
                context.set_trailing_metadata((pushback,))
            # After the trailing metadata: abort raises.
            await context.abort(getattr(grpc.StatusCode, error.grpc_code), str(error))


async def _read_request(
    request: Any, service: InferenceService, hold: Callable[[int], None]
) -> InferenceRequest:
    hold(size := request.ByteSize())
    parse = partial(parse_grpc, service.loaded.columns, request, service.config.limits)
    return await service.parse(size, parse)


def parse_grpc(columns: ModelColumns, request: Any, limits: RequestLimits) -> InferenceRequest:
    """Return what a ModelInferRequest asks for. Raise RequestError."""
    raw = request.raw_input_contents
    if len(raw) not in (0, len(request.inputs)):
        raise bad_request(
            f"raw_input_contents has {len(raw)} entries and inputs {len(request.inputs)}; both "
            "need the same, or there are none of the first. Correct the request"
        )
    tensors = []
    for place, each in enumerate(request.inputs):
        head = check_head(each.name, each.datatype, list(each.shape))
        if not raw:
            tensors.append(tensor_from_typed(*head, each.contents))
        # The protocol has raw_input_contents in place of contents, never beside them.
        elif each.HasField("contents"):
            raise bad_request(
                f"input {each.name[:80]!r} has contents beside raw_input_contents; one of them is "
                "allowed. Leave one out"
            )
        else:
            tensors.append(tensor_from_raw(*head, raw[place]))
    outputs = [output.name for output in request.outputs]
    parameters = _parse_parameters(request.parameters)
    return make_inference(columns, tensors, parameters, outputs, limits, request.id)


def _parse_parameters(values: Mapping[str, Any]) -> dict[str, object]:
    kinds = {name: value.WhichOneof("parameter_choice") for name, value in values.items()}
    return {name: getattr(values[name], kind) for name, kind in kinds.items() if kind is not None}


def _encode_response(model: str, request: InferenceRequest, answer: InferenceAnswer) -> Any:
    head = {"model_name": model, "model_version": answer.version, "id": request.request_id}
    response = pb.ModelInferResponse(**head)
    for name, value in answer.parameters.items():
        kind = "int64_param" if isinstance(value, int) else "string_param"
        setattr(response.parameters[name], kind, value)
    for name, values in answer.iterate_outputs(request):
        response.outputs.add(name=name, datatype="FP32", shape=values.shape)
        # Raw bytes: a typed field would be filled float by float.
        response.raw_output_contents.append(raw_bytes(values))
    return response
