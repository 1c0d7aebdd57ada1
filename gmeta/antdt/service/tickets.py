"""Where a caller waits for the answer to its request: in a thread, or on the event loop."""

import threading
from typing import Any, final

from gmeta.antdt.errors import RefusedError
from gmeta.antdt.rpc.loop import event_loop
from gmeta.antdt.storage.request import Answer, Answered

ANSWER_TIMEOUT_S = 60.0  # a commit that takes longer means a hung disk


@final
class Ticket:
    """Where a thread waits for its answer: a bare lock, the cheapest hand-over between two
    threads."""

    __slots__ = ("answer", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Taken at once: `deliver` opens it, and the caller waits by taking it again.
        self.lock.acquire()
        self.answer: Answer = None


def deliver(answered: list[Answered]) -> None:
    """Hand answers to whoever waits for them; called by the writer's threads after the commit. A
    ticket is a Ticket, or a future of the event loop, which is woken once for the whole group."""
    awaited = []
    for ticket, answer in answered:
        if isinstance(ticket, Ticket):
            ticket.answer = answer
            ticket.lock.release()
        else:
            awaited.append((ticket, answer))
    if awaited:
        event_loop().call_soon_threadsafe(resolve, awaited)


def resolve(awaited: list[tuple[Any, Answer]]) -> None:
    """Set the answers of futures; call it on the event loop."""
    for future, answer in awaited:
        if not future.done():  # else its caller has gone
            future.set_result(answer)


def told(answer: Answer) -> Any:
    """Return an answer. Raise it where it is a RefusedError."""
    if isinstance(answer, RefusedError):
        raise answer
    return answer


def hung_disk() -> RefusedError:
    """Return the refusal of a call that the disk did not answer in time."""
    return RefusedError(
        "UNAVAILABLE",
        "STORE_FAILED",
        f"the store did not commit within {ANSWER_TIMEOUT_S:.0f} s: its disk hangs. Check the "
        "disk; the call may or may not have been applied: retry it unchanged.",
    )
