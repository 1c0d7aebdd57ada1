"""A served model makes events of the support rows, and predicts what evaluation does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gmeta.errors import UserError
from gmeta.serving.formats.export_runtime import export_for
from gmeta.serving.model_loader import load
from gmeta.serving.server.input_columns import describe_columns
from metaio import DataError, open_dataset
from metaio.read.compose import compose
from tests.metaio.prepare.test_events import log, schema
from tests.support.commands import succeed

ENCODERS = ["sasrec", "hstu", "sim", "din"]


def trained(
    folder: Path, encoder: str, *changed: str, with_negatives: bool = False
) -> tuple[Path, pa.Table]:
    """An export of a run on rows with events, and the raw rows."""
    folder.mkdir(exist_ok=True)
    columns = log()
    # An item has one kind, which its vector is of.
    columns["kind"] = columns["item"] % 5 + 1
    # No two at one time: the dataset orders them by their hash, a request as they come.
    columns["time"] = np.random.default_rng(5).permutation(len(columns["user"]))
    body = schema(dense=[{"column": "number", "standardise": True}])
    body["item"] = {"column": "item", "columns": ["kind"]}
    body["row_id"] = {"column": "row"}
    body["events"] = {
        "columns": ["item", "kind"], "dense": ["number"], "where": "click = 1", "longest": 6,
        "delay": 3,
    }  # fmt: skip
    if with_negatives:
        columns["click"][:] = 1
        body["negatives"] = {"item": "item", "columns": body.pop("item")["columns"]}
        body["episodes"]["query_rows"] = 1
        del body["events"]["where"], body["events"]["delay"]
    rows = pa.table({**columns, "row": np.arange(len(columns["user"]))})
    pq.write_table(rows, folder / "log.parquet")
    (folder / "schema.toml").write_text(to_toml(body))
    data, run, out = folder / "data", folder / "run", folder / "model"
    succeed("prepare", "--schema", folder / "schema.toml", folder / "log.parquet", data)
    (folder / "train.toml").write_text("")
    succeed(
        "train", folder / "train.toml", f"data.path={data}", "data.tasks_per_step=16",
        "model.name=melu", "model.hidden=[8]", "model.embedding_dim=4", f"model.events={encoder}",
        "algorithm.inner_lr=0.5", "outer.sparse_lr=0.2", "outer.dense_lr=0.05", f"run.dir={run}",
        "run.device=cpu", "run.max_steps=6", *changed,
    )  # fmt: skip
    succeed("export", run, out)
    return out, rows


def to_toml(body: dict[str, Any]) -> str:
    lines = []
    for name, value in body.items():
        for table in value if isinstance(value, list) else [value]:
            lines.append(f"[[{name}]]" if isinstance(value, list) else f"[{name}]")
            lines += [f"{key} = {json.dumps(one)}" for key, one in table.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("encoder", "changed"),
    [*((each, ()) for each in ENCODERS), ("din", ('model.without=["item"]',))],
)
def test_served_predictions_are_those_on_the_dataset(
    tmp_path: Path, encoder: str, changed: tuple[str, ...]
) -> None:
    out, rows = trained(tmp_path, encoder, *changed)
    model = load(out)
    dataset = open_dataset(str(tmp_path / "data"))
    block = dataset.read_block("train", 0)
    batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
    found = model.predict_batch(batch)
    wanted = model.learner.objectives.outer.predictions(found.after_N)
    first, compared = 0, 0
    for task in range(batch.num_tasks):
        start, stop = batch.row_offsets_T1[task : task + 2].tolist()
        middle = start + int(batch.support_lengths_T[task])
        first = int((batch.row_offsets_T1.diff() - batch.support_lengths_T)[:task].sum())
        support, query = (
            rows.take(pa.array(batch.row_id_N[part].numpy()))
            for part in (slice(start, middle), slice(middle, stop))
        )
        # A query row of the dataset may know earlier query rows, and not yet the newest support:
        # a served one knows the support.
        if (batch.events_before_N[middle:stop] != support["click"].to_numpy().sum()).any():
            continue
        alone = model.adapt(support)
        own = wanted[first : first + stop - middle]
        torch.testing.assert_close(alone.predict(query), own, rtol=1e-4, atol=1e-5)
        kept = model.task(alone.state())
        assert torch.equal(kept.predict(query), alone.predict(query))
        # Rows in another order have the same times, and so the same events.
        turned = model.adapt(support.take(pa.array(np.arange(support.num_rows)[::-1])))
        torch.testing.assert_close(turned.predict(query), own, rtol=1e-4, atol=1e-5)
        compared += 1
    assert compared > 2


def test_drawn_negatives_are_no_events_as_in_the_dataset(tmp_path: Path) -> None:
    out, rows = trained(tmp_path, "sasrec", with_negatives=True)
    model, dataset = load(out), open_dataset(str(tmp_path / "data"))
    block = dataset.read_block("train", 0)
    batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
    found = model.predict_batch(batch)
    wanted = model.learner.objectives.outer.predictions(found.after_N)
    # The raw rows: a drawn one has the time of its positive, another item and label 0.
    ids = [batch.unique_ids_U[place_N.long()].numpy() for place_N in batch.positions_NF.unbind(1)]
    known = model.encode(rows, "query", False).ids_NF
    positive_N = np.maximum.accumulate(np.where(batch.label_N > 0, np.arange(batch.num_rows), 0))
    raw = rows.take(pa.array(batch.row_id_N.numpy()[positive_N])).to_pydict()
    raw["click"] = batch.label_N.numpy()
    for name, id_N, of_rows in zip(("item", "kind"), ids, known.T, strict=True):
        value = dict(zip(of_rows.tolist(), rows[name].to_pylist(), strict=True))
        raw[name] = [value[one] for one in id_N.tolist()]
    every, first = pa.table(raw), 0
    assert 0.1 < float(batch.label_N.mean()) < 0.3
    for task in range(batch.num_tasks):
        start, stop = batch.row_offsets_T1[task : task + 2].tolist()
        middle = start + int(batch.support_lengths_T[task])
        alone = model.adapt(every.slice(start, middle - start))
        num_query = stop - middle
        own = wanted[first : first + num_query]
        prediction = alone.predict(every.slice(middle, num_query))
        torch.testing.assert_close(prediction, own, rtol=1e-4, atol=1e-5)
        first += num_query
    assert first == len(wanted)
    export_for(out, tmp_path / "program", "torch")
    inputs = json.loads((tmp_path / "program" / "inputs.json").read_text())["inputs"]
    assert inputs["event_times"]["columns"][1] == {
        "name": "is_event", "where": "", "if_label_is_0": 0
    }  # fmt: skip


def test_many_tasks_at_once_are_each_alone(tmp_path: Path) -> None:
    out, rows = trained(tmp_path, "sasrec")
    model = load(out)
    support, query = rows.slice(0, 900), rows.slice(900)
    together = model.predict_tasks(support, query, allow_no_support=True)
    user_N = query["user"].to_numpy()
    for user in np.unique(user_N)[:6]:
        own_support = support.filter(pa.array(support["user"].to_numpy() == user))
        own_query = query.filter(pa.array(user_N == user))
        alone = model.adapt(own_support).predict(own_query)
        torch.testing.assert_close(
            together.after_N[torch.from_numpy(user_N == user)], alone, rtol=1e-4, atol=1e-5
        )
    # A task of which nothing is known has no events.
    assert torch.isfinite(model.predict(query)).all()


def test_what_events_need_is_said(tmp_path: Path) -> None:
    out, rows = trained(tmp_path, "sasrec")
    model = load(out)
    with pytest.raises(UserError, match="time"):
        model.adapt(rows.slice(0, 1).drop_columns(["time"]))
    at = rows.column_names.index("time")
    for times, message in (
        ([None, 3], "time column time has 1 null; each support row needs a time"),
        (["today", "now"], "holds text that is no time by ISO 8601"),
    ):
        with pytest.raises(DataError, match=message):
            model.adapt(rows.slice(0, 2).set_column(at, "time", pa.array(times)))
    # A server takes the time with support rows; it is no input of query rows.
    columns = describe_columns(model.config)
    assert columns.by_name["time"].role == "event"
    assert "time" not in [column.name for column in columns.read]


def test_programs_take_the_columns_that_inputs_json_tells(tmp_path: Path) -> None:
    out, rows = trained(tmp_path, "din")
    written = export_for(out, tmp_path / "program", "torch")
    assert written.left_out == ""
    told = json.loads((tmp_path / "program" / "inputs.json").read_text())
    assert told["inputs"]["event_times"]["columns"] == [
        {"name": "time"}, {"name": "is_event", "where": "click = 1"}
    ]  # fmt: skip
    model = load(out)
    user_N = rows["user"].to_numpy()
    support, query = rows.filter(pa.array(user_N == 3)), rows.slice(0, 20)
    known, wanted = model.encode(support, "support", True), model.encode(query, "query", False)
    times = [support["time"], pa.compute.equal(support["click"], 1)]
    inputs = {
        "support.event_times": np.stack([each.to_numpy().astype(float) for each in times], axis=1),
        "support.label": known.label_N,
    }
    for side, encoded in (("support.", known), ("query.", wanted)):
        inputs |= {side + "ids": encoded.ids_NF, side + "dense": encoded.dense_NK}
    program = torch.export.load(tmp_path / "program" / "adapt_predict.pt2").module()
    named = told["programs"]["adapt_predict.pt2"]
    assert set(inputs) == set(named)
    found = program({name: torch.from_numpy(inputs[name]) for name in named})
    expected = model.adapt(support).predict(query)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["none", "maml"])
def test_vectors_of_users_and_items_are_the_scores(tmp_path: Path, algorithm: str) -> None:
    changed = ["model.name=dot", f"algorithm.name={algorithm}", "algorithm.adapt_embeddings=false"]
    out, rows = trained(tmp_path, "sasrec", *changed)
    model = load(out)
    items = pq.read_table(out / "item_vectors.parquet")
    vectors = torch.tensor(items["vector"].to_pylist())
    place = {item: at for at, item in enumerate(items["item"].to_pylist())}
    user_N = rows["user"].to_numpy()
    query = rows.slice(0, 50)
    for user in (3, 7):
        task = model.adapt(rows.filter(pa.array(user_N == user)))
        score_N = torch.logit(task.predict(query).double())
        by_vector = vectors @ task.user_vector()
        own = torch.tensor([place[item] for item in query["item"].to_pylist()])
        difference = score_N - by_vector[own]
        # But for the bias, which is the same for all.
        assert float(difference.std()) < 1e-3
    with pytest.raises(UserError, match="makes no vector of a user"):
        load(trained(tmp_path / "melu", "sasrec")[0]).user_vectors([])
