"""The generated code is what `make protos` makes; the proto keeps its rules of extension."""

from pathlib import Path

import pytest
from google.protobuf import descriptor as pb

from gmeta_protos.antdt.v1 import shard_service_pb2 as wire
from tests.support.generated_stubs import PROTOS, generate_stubs

FILE = wire.DESCRIPTOR
SERVICE = FILE.services_by_name["ShardService"]


def all_messages() -> list[pb.Descriptor]:
    found = list(FILE.message_types_by_name.values())
    for message in found:
        found.extend(message.nested_types)
    return found


def all_enums() -> list[pb.EnumDescriptor]:
    return [*FILE.enum_types_by_name.values(), *(e for m in all_messages() for e in m.enum_types)]


def test_committed_code_is_what_the_generator_makes(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the generator is a development dependency")
    made = generate_stubs(tmp_path, tmp_path / "scratch")
    names = [str(file.relative_to(tmp_path)) for file in made]
    assert names == [
        "gmeta_protos/antdt/v1/shard_service_pb2.py",
        "gmeta_protos/antdt/v1/shard_service_pb2_grpc.py",
        "gmeta_protos/inference/v2/open_inference_pb2.py",
        "gmeta_protos/inference/v2/open_inference_pb2_grpc.py",
    ]
    for name in names:
        committed = PROTOS / name
        made_text = (tmp_path / name).read_text()
        assert committed.read_text() == made_text, f"{committed} is stale. Run: make protos"


def test_package_is_versioned() -> None:
    assert FILE.package == "gmeta.antdt.v1"


def test_each_rpc_has_its_own_request_and_response() -> None:
    for method in SERVICE.methods:
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"


def test_zero_of_each_enum_means_unspecified() -> None:
    for enum in all_enums():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED"), enum.full_name


def test_bytes_carry_manifests_and_nothing_else() -> None:
    names = {
        f.name for m in all_messages() for f in m.fields if f.type == pb.FieldDescriptor.TYPE_BYTES
    }
    assert names == {"manifest_json"}


def test_mutations_of_workers_carry_the_caller() -> None:
    exempt = [
        "RegisterDataset",
        "Register",
        "Status",
        "ListShards",
        "Audit",
        "Watch",
        "Requeue",
        "Skip",
        "Drain",
        "Stream",  # its requests do
    ]
    for method in SERVICE.methods:
        carries = "caller" in method.input_type.fields_by_name
        assert carries == (method.name not in exempt), method.name
