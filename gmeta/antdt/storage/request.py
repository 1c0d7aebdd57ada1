"""Requests to the ledger's one thread, and their answers: commands, and views in between."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import StoreError, StoreFullError, StoreTakenError
from gmeta.antdt.ledger import commands as cmd

# For types alone: at run time it would lengthen the longest chain of imports.
if TYPE_CHECKING:
    from gmeta.antdt.ledger.ledger import Ledger


class LedgerView(NamedTuple):
    """A question that changes nothing, answered in turn with the commands."""

    view: Callable[["Ledger", float], Any]


Request = cmd.Command | LedgerView
Answer = Any  # a Reply, what a view returned, or a RefusedError


class AnsweredRequest(NamedTuple):
    """One request's answer, with the ticket that `submit` got."""

    ticket: Any
    answer: Answer


def is_early(answer: Answer) -> bool:
    """Return whether an answer needs no durability."""
    # A grant lost in a power cut is fenced by the next service epoch. END and WAIT are not early:
    # they may follow from completions that are not durable yet.
    return isinstance(answer, cmd.GrantReply | cmd.HeartbeatReply)


def refusal_of(error: StoreError) -> RefusedError:
    """Return the answer to a call that the store did not take."""
    if isinstance(error, StoreFullError):
        return RefusedError("RESOURCE_EXHAUSTED", "STORE_FULL", str(error))
    if isinstance(error, StoreTakenError):
        return RefusedError("UNAVAILABLE", "STORE_TAKEN", str(error))
    return RefusedError("UNAVAILABLE", "STORE_FAILED", str(error))
