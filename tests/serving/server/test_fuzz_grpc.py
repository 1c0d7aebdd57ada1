"""Messages of gRPC that are wrong in random ways: each is refused in a line, the server stays as it
was. GMETA_FUZZ_REQUESTS=5000 sends more of them, and as many that are right."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gmeta_protos.inference.v2 import open_inference_pb2 as pb
from gmeta_protos.inference.v2 import open_inference_pb2_grpc as pb_grpc
from tests.serving.server.serving import RunningServer, running_server
from tests.serving.server.test_fuzz import (
    GROWTH_BYTES,
    NUM_REQUESTS,
    SINGLE,
    VALID,
    assert_well,
    resident_bytes,
    right_request,
)
from tests.serving.server.test_grpc import message
from tests.support.waiting import PATIENCE_S

REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
Mutation = Callable[[random.Random, Any], None]


def place_of(request: Any, *names: str) -> int:
    """Where the first of the inputs with one of these names stands."""
    return next(place for place, each in enumerate(request.inputs) if each.name in names)


def contents_of(each: Any) -> Any:
    """The typed elements of an input."""
    found = each.contents
    return found.fp64_contents if each.datatype == "FP64" else found.int64_contents


def no_input(rng: random.Random, request: Any) -> None:
    place = rng.choice([0, 1, 2, 4, 6])
    del request.inputs[place]
    if request.raw_input_contents:
        del request.raw_input_contents[place]


def another_model(rng: random.Random, request: Any) -> None:
    request.model_name = rng.choice(["", "other", "m" * 5_000, "mod\nel"])


def another_version(rng: random.Random, request: Any) -> None:
    request.model_version = rng.choice(["1", "x" * 5_000, "\x00"])


def another_name(rng: random.Random, request: Any) -> None:
    each = rng.choice(request.inputs)
    each.name = rng.choice([each.name + "x", "", "support." + each.name, "x" * 9_000, "\n"])


def another_datatype(rng: random.Random, request: Any) -> None:
    each = request.inputs[place_of(request, rng.choice(SINGLE))]
    each.datatype = rng.choice(["BYTES", "BOOL", "BF16", "INT63", "", "int64", "\r"])


def another_shape(rng: random.Random, request: Any) -> None:
    each = rng.choice(request.inputs)
    size = each.shape[0]
    del each.shape[:]
    each.shape.extend(
        rng.choice([[], [size + 1], [-size - 1], [size, 2], [1, 1, size], [2**62, 3], [2**62] * 2])
    )


def impossible_value(rng: random.Random, request: Any) -> None:
    name, values = rng.choice(
        [
            ("item", [-1, 50, 2**62]), ("support.city", [-1, 8, -(2**63)]),
            ("support.click", [2, -1]), ("price", [float("nan"), float("inf"), 1e308]),
            ("tags.lengths", [-100, 2**40]),
        ]
    )  # fmt: skip
    place = place_of(request, name)
    each = request.inputs[place]
    del request.raw_input_contents[:]  # typed, whatever the others are
    for one, valid in zip(request.inputs, message(VALID).inputs, strict=True):
        one.CopyFrom(valid)
    contents_of(each)[rng.randrange(len(contents_of(each)))] = rng.choice(values)


def another_number_of_bytes(rng: random.Random, request: Any) -> None:
    if request.raw_input_contents:
        place = rng.randrange(len(request.inputs))
        kept = request.raw_input_contents[place]
        request.raw_input_contents[place] = rng.choice([b"", kept[:-1], kept + b"x", kept * 2])
    else:
        contents_of(request.inputs[place_of(request, *SINGLE)]).append(1)


def more_or_fewer_contents(rng: random.Random, request: Any) -> None:
    if request.raw_input_contents and rng.random() < 0.5:
        del request.raw_input_contents[rng.randrange(len(request.raw_input_contents)) :]
        request.raw_input_contents.append(b"1")
        request.raw_input_contents.append(b"1")
    request.raw_input_contents.append(rng.randbytes(rng.randrange(40)))


def both_kinds(rng: random.Random, request: Any) -> None:
    each = rng.choice(request.inputs)
    each.contents.bytes_contents.append(rng.randbytes(9))
    each.contents.bool_contents.append(True)
    if not request.raw_input_contents:
        each.contents.ClearField(rng.choice(["int64_contents", "fp64_contents"]))
        each.contents.uint_contents.append(7)


def another_key(rng: random.Random, request: Any) -> None:
    name, value = rng.choice(
        [
            ("int64_param", 3), ("bool_param", True), ("double_param", 0.5), ("string_param", ""),
            ("string_param", "x" * 257), ("string_param", "a\nb"),
        ]
    )  # fmt: skip
    setattr(request.parameters["task_key"], name, value)


def nobodys_key(rng: random.Random, request: Any) -> None:
    key = f"{rng.random()}"
    request.CopyFrom(message({**VALID, "inputs": VALID["inputs"][:7]}))
    request.parameters["task_key"].string_param = key


def another_output(rng: random.Random, request: Any) -> None:
    request.outputs.add(name=rng.choice(["", "no", "x" * 9_000, "\n\n"]))


def long_id(rng: random.Random, request: Any) -> None:
    request.id = "x" * rng.randrange(257, 9_000)


def twice(rng: random.Random, request: Any) -> None:
    place = rng.randrange(len(request.inputs))
    request.inputs.append(request.inputs[place])
    if request.raw_input_contents:
        request.raw_input_contents.append(request.raw_input_contents[place])


def nothing(rng: random.Random, request: Any) -> None:
    request.CopyFrom(pb.ModelInferRequest(model_name="model"))


def too_many_rows(rng: random.Random, request: Any) -> None:
    request.CopyFrom(message(VALID))
    for each in request.inputs:
        if not each.name.startswith("support."):
            contents_of(each).extend(list(contents_of(each)) * 1_999)
            each.shape[0] *= 2_000


MUTATIONS: tuple[Mutation, ...] = (
    no_input, another_model, another_version, another_name, another_datatype, another_shape,
    impossible_value, another_number_of_bytes, more_or_fewer_contents, both_kinds, another_key,
    nobodys_key, another_output, long_id, twice, nothing, too_many_rows,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[RunningServer]:
    with running_server(exported, "--no-access-log", "--timeout", "60") as found:
        yield found


def assert_refused(call: Callable[..., Any], content: Any, told: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(content, timeout=PATIENCE_S)
    line = caught.value.details()
    told = f"{told}: {str(content)[:300]} -> {caught.value.code()} {line!r:.300}"
    assert caught.value.code() in REFUSED, told
    assert line.isprintable(), told
    assert 10 < len(line) <= 1_000, told


def test_wrong_requests_are_refused_in_a_line_and_leave_nothing(server: RunningServer) -> None:
    rng, before = random.Random(11), 0
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        for number in range(NUM_REQUESTS):
            mutation = MUTATIONS[number % len(MUTATIONS)]
            request = message(VALID, raw=rng.random() < 0.5)
            mutation(rng, request)
            assert_refused(call, request, mutation.__name__)
            assert call(message(right_request(number)), timeout=PATIENCE_S).raw_output_contents
            if number == NUM_REQUESTS // 4:
                before = resident_bytes(server.process.pid)
        assert resident_bytes(server.process.pid) - before < GROWTH_BYTES
        assert len(call(message(VALID), timeout=PATIENCE_S).raw_output_contents) == 1
    assert "Traceback" not in server.process.stderr


def test_what_is_hardly_a_message_is_refused(server: RunningServer) -> None:
    rng = random.Random(5)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(NUM_REQUESTS // 3):
            # A model's name, then anything: most of it still is a message.
            content = b"\x0a\x05model" + rng.randbytes(rng.randrange(300))
            assert_refused(call, content, "noise")
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client:
        assert_well(server, client)
        assert 'status="500"' not in client.get("/metrics").text
