"""What of a caller's words reaches ledger, logs and an operator's terminal."""

import pytest

from gmeta.antdt.rpc.command_codecs import CODECS
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("row 3\nfake: line", "row 3 fake: line"),
        ("\x1b[2Jgone", " [2Jgone"),
        ("\x9b2Jgone", " 2Jgone"),  # the same to a terminal, in one character
        ("col\u2028fake: line", "col fake: line"),
    ],
)
def test_a_failure_brings_no_control_characters(message: str, kept: str) -> None:
    to_command, _ = CODECS["Fail"]
    command = to_command(pb.FailRequest(failure_class="bad", message=message))
    assert command.message == kept  # type: ignore[union-attr]
