"""Parts of a stored table, some rows at a time, against what torch loads at once."""

import io
from pathlib import Path

import pytest
import torch

from gmeta.runs.checkpoints import table_records
from gmeta.runs.checkpoints.table_records import FileSlice, copy_table
from tests.support.refusals import catch_message


@pytest.mark.parametrize("offsets", [(0, 0), (5, 0), (3, 4)])
def test_any_part_is_copied_in_blocks(
    offsets: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_records, "BLOCK_BYTES", 100)  # three rows
    whole = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    stored = io.BytesIO()
    torch.save(whole, stored)
    length = len(stored.getvalue())
    file = FileSlice(io.BytesIO(b"before" + stored.getvalue() + b"behind"), 6, length)
    target = torch.zeros(20 - offsets[0] - 2, 8 - offsets[1])
    copy_table(file, whole.shape, offsets, target)
    assert torch.equal(target, whole[offsets[0] : 18, offsets[1] :])


def test_one_number_a_row_is_copied() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(9.0), file)
    target = torch.zeros(4)
    copy_table(file, (9,), (3,), target)
    assert target.tolist() == [3.0, 4.0, 5.0, 6.0]


def test_what_is_no_such_table_is_refused(tmp_path: Path) -> None:
    file, target = io.BytesIO(), torch.zeros(4)
    torch.save(torch.zeros(4), file)
    assert catch_message(ValueError, copy_table, file, (5,), (0,), target) == (
        "a table holds [(16, 0)] where the index says 20 bytes"
    )
    assert catch_message(ValueError, copy_table, io.BytesIO(b"no"), (4,), (0,), target) == (
        "a table is no archive of torch's: File is not a zip file"
    )
