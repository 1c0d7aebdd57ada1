"""The records of a store: their bytes are what earlier versions wrote and later ones must read."""

from typing import get_args

import pytest

from gmeta.antdt.errors import StoreFailedError
from gmeta.antdt.ledger import events as ev
from tests.support.refusals import catch_message

# What a store may hold, event by event. A line here is never changed: a store outlives the program.
WRITTEN: list[tuple[ev.Event, bytes]] = [
    (ev.ServiceStarted(3, "job"), b'["start",3,"job"]'),
    (ev.DatasetAdded({"name": "d", "shuffle": True}), b'["dataset",{"name":"d","shuffle":true}]'),
    (ev.GenerationStarted(2, 5), b'["generation",2,5]'),
    (ev.WorkerRegistered("rank0", "p"), b'["worker","rank0","p"]'),
    (
        ev.LeasesGranted("rank0", 1, 77, "d", 0, 1099511627777, [(4, 0, 1)]),
        b'["grant","rank0",1,77,"d",0,1099511627777,[[4,0,1]]]',
    ),
    (ev.BackupsWanted("x1", [7, 8]), b'["backups","x1",[7,8]]'),
    (
        ev.BackupGranted("rank1", 1, 77, "d", 0, 9, [(4, 0, 1)], 7),
        b'["backup","rank1",1,77,"d",0,9,[[4,0,1]],7]',
    ),
    (ev.UnitsProgressed([(7, 3)]), b'["progress",[[7,3]]]'),
    (ev.ShardsCompleted("rank0", 2, 77, [(7, 1)]), b'["complete","rank0",2,77,[[7,1]]]'),
    (ev.ShardsReleased("rank0", 3, 77, [(8, 1)]), b'["release","rank0",3,77,[[8,1]]]'),
    (
        ev.ShardFailed("rank0", 4, 77, 9, "bad: row 3", False),
        b'["fail","rank0",4,77,9,"bad: row 3",false]',
    ),
    (ev.LeasesExpired([7, 8]), b'["expire",[7,8]]'),
    (ev.EpochOpened("d", 1), b'["epoch","d",1]'),
    (ev.CheckpointPrepared("c", 10, "ab", "{}"), b'["prepare","c",10,"ab","{}"]'),
    (ev.CheckpointCommitted("c"), b'["commit","c"]'),
    (ev.StateRestored("r", "rank0", 2, "ab", ""), b'["restore","r","rank0",2,"ab",""]'),
    (ev.ActionPosted("", "x2", 2, 40, {"rank0": 8.0}), b'["action","","x2",2,40,{"rank0":8.0}]'),
    (ev.ActionAcked("x2", 1, "done"), b'["ack","x2",1,"done"]'),
    (ev.ShardsRequeued("o1", "d", [4]), b'["requeue","o1","d",[4]]'),
    (ev.ShardsSkipped("o2", "d", [5], "corrupt"), b'["skip","o2","d",[5],"corrupt"]'),
    (ev.DrainSet("o3", "", True), b'["drain","o3","",true]'),
    (ev.ReadingsTaken([(4, 9.5, {"loss": 0.5})]), b'["readings",[[4,9.5,{"loss":0.5}]]]'),
    (ev.RunReported("training", "/runs/a", 90, 9.5), b'["run","training","/runs/a",90,9.5]'),
]


def test_every_kind_of_event_has_a_record_here() -> None:
    assert {type(event) for event, _ in WRITTEN} == set(get_args(ev.Event))


@pytest.mark.parametrize(("event", "record"), WRITTEN, ids=lambda x: type(x).__name__)
def test_an_event_is_written_and_read_as_it_always_was(event: ev.Event, record: bytes) -> None:
    assert ev.encode(event) == record
    read = ev.decode(record)
    assert type(read) is type(event)
    # Tuples come back as lists; what matters is that they are written the same again.
    assert ev.encode(read) == record


def test_a_line_break_of_a_note_does_not_end_its_record() -> None:
    failed = ev.ShardFailed("rank0", 4, 77, 9, "line 1\nline 2 \u2028 ü", False)
    record = ev.encode(failed)
    assert b"\n" not in record
    assert ev.decode(record) == failed


@pytest.mark.parametrize(
    "record",
    [
        b"", b"\xff", b"7", b"[]", b'["later",1]', b'["commit"]', b'["commit","c","more"]',
        b'[["commit"],"c"]',
    ],
)  # fmt: skip
def test_a_record_that_no_version_wrote_is_damage(record: bytes) -> None:
    told = catch_message(StoreFailedError, ev.decode, record)
    assert told.startswith(
        f"the ledger holds the record {record!r}, which is none of ['ack', 'action', 'backup', "
    )
    assert told.endswith(
        "). Restore it from a backup, or delete it: the manifest in a checkpoint rebuilds the "
        "service."
    )
