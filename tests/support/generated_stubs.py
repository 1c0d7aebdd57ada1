"""Generates the modules of protos/: `make protos` writes them, tests compare them."""

import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parents[2] / "protos"
INFERENCE = "inference/v2/open_inference.proto"


def generate_stubs(folder: Path, scratch: Path) -> list[Path]:
    """The files made below `folder`; `scratch` holds a copy of the inference protocol meanwhile."""
    copy = scratch / INFERENCE
    copy.parent.mkdir(parents=True)
    # Only Python has one pool of all messages by name, and every client of the protocol has the
    # same names. The calls keep theirs: those are what travels.
    text = (PROTOS / INFERENCE).read_text()
    copy.write_text(text.replace("package inference;", "package gmeta.inference;", 1))
    _run_protoc(PROTOS, "antdt/v1/shard_service.proto", "python", "grpc_python", folder=folder)
    _run_protoc(PROTOS, INFERENCE, "grpc_python", folder=folder)
    _run_protoc(scratch, INFERENCE, "python", folder=folder)
    return sorted((folder / "gmeta_protos").rglob("*_pb2*.py"))


def _run_protoc(source: Path, proto: str, *kinds: str, folder: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Igmeta_protos={source}"]
    outputs = [f"--{kind}_out={folder}" for kind in kinds]
    subprocess.run([*command, *outputs, f"gmeta_protos/{proto}"], check=True)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        generate_stubs(PROTOS, Path(scratch))
