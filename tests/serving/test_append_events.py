"""A served task takes further events: predictions are those of a task that knew them all."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gmeta.errors import UserError
from gmeta.serving.model_loader import load
from gmeta.serving.served_model import ServedModel
from metaio import open_dataset
from metaio.read.compose import compose
from tests.serving.test_events import ENCODERS, to_toml, trained
from tests.support.commands import succeed
from tests.support.refusals import catch_message


def events_of(user: int, count: int, first: int, seed: int = 0) -> pa.Table:
    """Events of a task, from a time on, one after the other."""
    rng = np.random.default_rng([user, seed])
    item = rng.integers(1, 90, count)
    return pa.table(
        {
            "item": item, "kind": item % 5 + 1, "number": rng.normal(700.0, 300.0, count),
            "click": np.ones(count, np.int64), "time": first + np.cumsum(rng.integers(0, 9, count)),
        }
    )  # fmt: skip


def rows_of(rows: pa.Table, user: int) -> pa.Table:
    return rows.filter(pa.array(rows["user"].to_numpy() == user))


def calls(model: ServedModel) -> list[int]:
    """How many events each later call of the encoder embeds."""
    found: list[int] = []
    encoder = model.learner.events
    assert encoder is not None
    embed = encoder.embed_THD

    def counted(rectangle: Any, *others: Any) -> torch.Tensor:
        found.append(rectangle.position_THM.shape[1])
        return embed(rectangle, *others)

    encoder.embed_THD = counted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("encoder", [*ENCODERS, "linear"])
def test_appended_events_are_known_as_in_a_fresh_pass(tmp_path: Path, encoder: str) -> None:
    more = ["model.event_options.attention=linear"] if encoder == "linear" else []
    out, rows = trained(tmp_path, "sasrec" if encoder == "linear" else encoder, *more)
    model, last = load(out), int(rows["time"].to_numpy().max())
    query = rows.slice(0, 40)
    for user in (3, 7):
        support = rows_of(rows, user)
        task = model.adapt(support)
        before = task.predict(query)
        parts = [events_of(user, count, last + 100 * at, at) for at, count in enumerate((1, 3, 2))]
        for count in range(1, len(parts) + 1):
            task.append(parts[count - 1])
            fresh = model.adapt(support, pa.concat_tables(parts[:count]))
            torch.testing.assert_close(task.predict(query), fresh.predict(query), rtol=0, atol=1e-5)
            # Bytes have the events, and what was made of them is made anew.
            kept = model.task(task.state())
            torch.testing.assert_close(kept.predict(query), task.predict(query), rtol=0, atol=1e-5)
            kept.append(parts[0].set_column(4, "time", pa.array([last + 900])))
            # Several tasks in one batch, one of which remembers nothing.
            torch.testing.assert_close(
                model.predict_encoded(
                    [task._state, model.unadapted],
                    model.encode(pa.concat_tables([query, query]), "query", False),
                    [40, 40],
                )[:40],
                task.predict(query),
                rtol=0,
                atol=1e-5,
            )
        # The sums of DIN have grown beyond what a probability shows.
        assert encoder == "din" or not torch.equal(task.predict(query), before)


@pytest.mark.parametrize("encoder", ["sasrec", "hstu"])
def test_only_new_events_are_encoded(tmp_path: Path, encoder: str) -> None:
    out, rows = trained(tmp_path, encoder)
    model, last = load(out), int(rows["time"].to_numpy().max())
    task = model.adapt(rows_of(rows, 3))
    task.append(events_of(3, 2, last + 1))
    encoded = calls(model)
    for at in range(3):
        task.append(events_of(3, 2, last + 100 * (at + 1), at))
        task.predict(rows.slice(0, 5))
    assert encoded == [2, 2, 2]
    # An event that is older than the last one is put into its place.
    late = events_of(3, 1, last + 50)
    task.append(late)
    assert encoded[3] > 9
    whole = [events_of(3, 2, last + 1), late]
    whole += [events_of(3, 2, last + 100 * (at + 1), at) for at in range(3)]
    fresh = model.adapt(rows_of(rows, 3), pa.concat_tables(whole))
    query = rows.slice(0, 30)
    torch.testing.assert_close(task.predict(query), fresh.predict(query), rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_what_a_support_row_knows_adapts_the_task_anew(tmp_path: Path, encoder: str) -> None:
    out, rows = trained(tmp_path, encoder)
    model, query = load(out), rows.slice(0, 30)
    support = rows_of(rows, 5)
    middle = int(np.median(support["time"].to_numpy()))
    task = model.adapt(support)
    task.append(events_of(5, 3, middle))
    fresh = model.adapt(support, events_of(5, 3, middle))
    torch.testing.assert_close(task.predict(query), fresh.predict(query), rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_events_alone_are_the_newest(tmp_path: Path, encoder: str) -> None:
    out, rows = trained(tmp_path, encoder)
    model, query = load(out), rows.slice(0, 30)
    events = events_of(1, 20, 0)
    task = model.adapt(events=events.slice(0, 4))
    for first, count in ((4, 1), (5, 3), (8, 9), (17, 3)):  # the dataset keeps 6
        task.append(events.slice(first, count))
        known = events.slice(0, first + count)
        for fresh in (known, known.slice(max(len(known) - 6, 0))):
            torch.testing.assert_close(
                task.predict(query), model.adapt(events=fresh).predict(query), rtol=0, atol=1e-5
            )
    unknown = events.set_column(3, "click", pa.array(np.zeros(20, np.int64)))
    before = task.predict(query)
    task.append(unknown)  # no row of [events] where
    assert torch.equal(task.predict(query), before)


def test_a_state_with_support_brings_its_events_to_another_version(tmp_path: Path) -> None:
    out, rows = trained(tmp_path / "a", "sasrec")
    newer, _ = trained(tmp_path / "b", "sasrec", "run.seed=9")
    model, other, query = load(out), load(newer), rows.slice(0, 30)
    last = int(rows["time"].to_numpy().max())
    task = model.adapt(rows_of(rows, 3))
    task.append(events_of(3, 4, last))
    renewed = other.task(task.state(with_support=True))
    fresh = other.adapt(rows_of(rows, 3), events_of(3, 4, last))
    torch.testing.assert_close(renewed.predict(query), fresh.predict(query), rtol=0, atol=1e-5)


def test_what_is_wrong_with_events_is_said(tmp_path: Path) -> None:
    out, rows = trained(tmp_path, "sasrec")
    model = load(out)
    task = model.adapt(rows_of(rows, 3))
    message = catch_message(UserError, task.append, events_of(3, 1, 0).drop_columns(["kind"]))
    assert message.startswith("event rows have no column kind; ")
    assert message.endswith("This model reads time, item, kind, number, click. Add the column")
    of_two = pa.concat_tables([events_of(3, 1, 0)] * 2).append_column("user", pa.array([3, 4]))
    message = catch_message(UserError, task.append, of_two)
    assert message == "the events are of 2 tasks: those of 1 are needed"
    with pytest.raises(UserError, match="support has 0 rows"):
        model.adapt()


@pytest.mark.parametrize("encoder", ["sasrec", "sim"])
def test_events_of_another_log_are_served_as_in_the_dataset(tmp_path: Path, encoder: str) -> None:
    from tests.metaio.prepare.test_event_files import views, write
    from tests.metaio.prepare.test_events import log, schema

    columns, events = log(), views()
    events["number"] = events["number"] % 700
    # No two at one time: the dataset orders them by their hash, a request as they come.
    rng = np.random.default_rng(5)
    columns["time"] = rng.permutation(len(columns["user"]))
    events["time"] = rng.permutation(len(events["user"]))
    body = schema(dense=[{"column": "number", "standardise": True}], row_id={"column": "row"})
    files = write(tmp_path / "views", events)
    body["events"] = {"columns": ["item"], "dense": ["number"], "files": files, "where": "seen = 1"}
    rows = pa.table({**columns, "row": np.arange(len(columns["user"]))})
    pq.write_table(rows, tmp_path / "log.parquet")
    (tmp_path / "schema.toml").write_text(to_toml(body))
    (tmp_path / "train.toml").write_text("")
    data, run, out = tmp_path / "data", tmp_path / "run", tmp_path / "model"
    succeed("prepare", "--schema", tmp_path / "schema.toml", tmp_path / "log.parquet", data)
    succeed(
        "train", tmp_path / "train.toml", f"data.path={data}", "data.tasks_per_step=16",
        "model.name=melu", "model.hidden=[8]", "model.embedding_dim=4", f"model.events={encoder}",
        "outer.sparse_lr=0.2", f"run.dir={run}", "run.device=cpu", "run.max_steps=4",
    )  # fmt: skip
    succeed("export", run, out)
    model, dataset = load(out), open_dataset(str(data))
    block = dataset.read_block("train", 0)
    batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
    wanted = model.learner.objectives.outer.predictions(model.predict_batch(batch).after_N)
    all_events, first, compared = pa.table(events), 0, 0
    for task in range(batch.num_tasks):
        start, stop = batch.row_offsets_T1[task : task + 2].tolist()
        middle = start + int(batch.support_lengths_T[task])
        support, query = (
            rows.take(pa.array(batch.row_id_N[part].numpy()))
            for part in (slice(start, middle), slice(middle, stop))
        )
        user, own = support["user"][0].as_py(), wanted[first : first + stop - middle]
        first += stop - middle
        for at in range(query.num_rows):
            row = query.slice(at, 1)
            is_known_N = (events["user"] == user) & (events["time"] < row["time"][0].as_py())
            known = all_events.filter(pa.array(is_known_N))
            alone = model.adapt(support, known).predict(row)
            torch.testing.assert_close(alone, own[at : at + 1], rtol=1e-4, atol=1e-5)
            compared += 1
        if compared > 30:
            break
