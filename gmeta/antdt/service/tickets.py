"""Answers of the writer, handed to the calls that wait for them on the event loop."""

from collections.abc import Sequence
from typing import Any

from gmeta.access.errors import RefusedError
from gmeta.antdt.rpc.event_loop import event_loop
from gmeta.antdt.storage.request import Answer, AnsweredRequest

ANSWER_TIMEOUT_S = 60.0  # a commit that takes longer means a hung disk


def deliver(answered: list[AnsweredRequest]) -> None:
    """Hand answers to the futures that are their tickets; the writer's threads call this."""
    if answered:
        # One call for the group, so that the event loop is woken once.
        event_loop().call_soon_threadsafe(resolve, answered)


def resolve(answered: Sequence[tuple[Any, Answer]]) -> None:
    """Set the futures' answers, or their exceptions; call it on the event loop."""
    for future, answer in answered:
        if future.done():
            continue  # its caller has left
        if isinstance(answer, RefusedError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def hung_disk_refusal() -> RefusedError:
    """Return the refusal of a call that the disk did not answer in time."""
    return RefusedError(
        "UNAVAILABLE",
        "STORE_FAILED",
        f"the store did not commit within {ANSWER_TIMEOUT_S:.0f} s: its disk hangs. Check the "
        "disk; the call may or may not have been applied: retry it unchanged.",
    )
