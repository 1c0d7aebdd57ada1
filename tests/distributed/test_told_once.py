"""A refusal that all ranks share is told once; one of a single rank is told, and nothing hangs."""

import io
from contextlib import redirect_stderr

import pytest

from gmeta.cli.commands.work.shared_error import report_once
from gmeta.distributed.ranks import Ranks, barrier
from gmeta.errors import GMetaError, UserError
from metaio import FormatError
from tests.distributed.harness import on_ranks
from tests.support.waiting import PATIENCE_S


def refuse(
    ranks: Ranks, of_rank: dict[int, Exception], patience_s: float
) -> tuple[str, int | str | None]:
    """What this rank writes, and its exit code: None where nothing ends it."""
    written = io.StringIO()
    code: int | str | None = None
    barrier(ranks)
    with redirect_stderr(written):
        try:
            with report_once(ranks, patience_s):
                if ranks.rank in of_rank:
                    raise of_rank[ranks.rank]
        except SystemExit as end:
            code = end.code
    barrier(ranks)  # the first of them holds the store
    return written.getvalue(), code


@pytest.mark.distributed
def test_all_ranks_with_one_reason_tell_it_once_with_their_exit_code() -> None:
    same = dict.fromkeys(range(4), UserError("no such split. Name another"))
    first, *others = on_ranks(4, refuse, same, PATIENCE_S)
    assert first == ("error on rank 0: no such split. Name another\n", 2)
    assert others == [("", 2)] * 3


@pytest.mark.distributed
def test_ranks_with_reasons_of_their_own_tell_them() -> None:
    damaged = FormatError("block 7 is damaged. Copy it again")
    reasons = {0: damaged, 1: damaged, 2: GMetaError("disk 2 is full. Free some")}
    assert on_ranks(4, refuse, reasons, 0.5) == [
        ("error on rank 0: block 7 is damaged. Copy it again\n", 1), ("", 1),
        ("error on rank 2: disk 2 is full. Free some\n", 1), ("", None),
    ]  # fmt: skip


@pytest.mark.distributed
def test_a_rank_that_is_alone_with_its_reason_tells_it() -> None:
    expected = [("", None), ("error on rank 1: no GPU here. Set run.device\n", 2)]
    assert on_ranks(2, refuse, {1: UserError("no GPU here. Set run.device")}, 0.2) == expected
