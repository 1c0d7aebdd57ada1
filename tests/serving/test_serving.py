"""Serving: many tasks as one by one, wrong rows, damaged folders, a fresh interpreter, threads."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import gmeta
from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.adaptation.closed_form import MOST_SERVED_ROWS
from gmeta.cli.main import app
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import SupportFeaturesConfig
from gmeta.errors import UserError
from gmeta.serving import task_matching as tasks
from gmeta.serving.row_encoders import as_table
from gmeta.serving.served_model import ServedModel
from gmeta.serving.table_format import TableFormat
from gmeta_models import MODELS, ModelConfig
from metaio.errors import DataError
from tests.support.commands import environment
from tests.support.exported import metaemb_rate, random_rows, write_random_model
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S


def of_task(rows: pa.Table, task: int) -> pa.Table:
    return rows.filter(pa.compute.equal(rows["user"], task))


def assert_as_one_by_one(served: ServedModel, num_rows: int, num_tasks: int) -> None:
    """Rows of two more tasks than have support: at once, and task by task."""
    support = random_rows(num_rows, seed=1, num_tasks=num_tasks - 2)
    query = random_rows(num_rows, seed=2, num_tasks=num_tasks)
    found = served.predict_tasks(support, query, allow_no_support=True)
    users = query["user"].to_numpy()
    assert len(set(users.tolist()) - set(support["user"].to_pylist())) == 2
    for task in range(num_tasks):
        mine, yours = of_task(support, task), of_task(query, task)
        before_N = served.predict(yours)
        after_N = served.adapt(mine).predict(yours) if mine.num_rows else before_N
        chosen_N = torch.from_numpy(users == task)
        assert found.support_rows_N[chosen_N].tolist() == [mine.num_rows] * yours.num_rows
        torch.testing.assert_close(found.before_N[chosen_N], before_N, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.after_N[chosen_N], after_N, rtol=0, atol=1e-6)
    assert float((found.after_N - found.before_N).abs().max()) > 1e-3


@pytest.mark.parametrize(("batch_rows", "piece_rows"), [(8_192, 4_096), (40, 7), (1, 1)])
def test_many_tasks_at_once_are_as_one_by_one(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, batch_rows: int, piece_rows: int
) -> None:
    monkeypatch.setattr(tasks, "_BATCH_ROWS", batch_rows)
    monkeypatch.setattr(tasks, "_PIECE_ROWS", piece_rows)
    assert_as_one_by_one(served, num_rows=120, num_tasks=11)


@pytest.mark.parametrize("table_format", ["float32", "int8"])
@pytest.mark.parametrize("algorithm", [*sorted(ALGORITHMS), "none"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_and_algorithm_can_be_served(
    tmp_path: Path, model: str, algorithm: str, table_format: TableFormat
) -> None:
    config = AlgorithmConfig(algorithm, inner_steps=2, inner_lr=0.3)
    if algorithm == "metaemb":
        rate = metaemb_rate(model)
        config = replace(
            config,
            inner_lr=rate,
            adapt_embeddings=("city",),
            options={**config.options, "content": ("tags",)},
        )
    write_random_model(
        tmp_path,
        table_format=table_format,
        algorithm=config,
        model=ModelConfig(
            model, 4, hidden=(8,), options={"bottom": (8,), "history": "seen", "attention": (4,)}
        ),
    )
    assert_as_one_by_one(gmeta.load(tmp_path), num_rows=40, num_tasks=4)


def test_a_step_that_is_solved_takes_so_many_support_rows_and_no_more(tmp_path: Path) -> None:
    write_random_model(tmp_path, algorithm=AlgorithmConfig("ridge", inner_lr=0.3))
    served = gmeta.load(tmp_path)
    support, query = random_rows(MOST_SERVED_ROWS + 1), random_rows(5, seed=2)
    adapted = served.adapt(support.slice(1)).predict(query)
    assert float((adapted - served.predict(query)).abs().max()) > 1e-3
    told = (
        "a task has 2,049 support rows; ridge, which solves for as many unknowns, takes at most "
        "2,048. Keep the newest of them"
    )
    assert catch_message(UserError, served.adapt, support) == told
    assert catch_message(UserError, served.predict_tasks, support, query) == told


def test_a_step_that_is_taken_takes_any_number_of_support_rows(tmp_path: Path) -> None:
    write_random_model(tmp_path)
    adapted = gmeta.load(tmp_path).adapt(random_rows(MOST_SERVED_ROWS + 1))
    assert adapted.predict(random_rows(5, seed=2)).isfinite().all()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_statistics_of_support_rows_are_served(tmp_path: Path, model: str) -> None:
    write_random_model(
        tmp_path,
        algorithm=AlgorithmConfig(inner_steps=2, inner_lr=0.3),
        model=ModelConfig(
            model, 4, hidden=(8,), options={"bottom": (8,), "history": "seen", "attention": (4,)}
        ),
        support_features=SupportFeaturesConfig(
            task=True, columns=("city", "tags"), label_prior=(0.5, 0.5)
        ),
    )
    served = gmeta.load(tmp_path)
    assert_as_one_by_one(served, num_rows=40, num_tasks=4)
    # What a task's rows share with its support is found for rows that come later, one at a time.
    adapted, query = served.adapt(random_rows(9, seed=1)), random_rows(5, seed=2)
    alone = torch.cat([adapted.predict(query.slice(row, 1)) for row in range(5)])
    torch.testing.assert_close(alone, adapted.predict(query), rtol=0, atol=1e-6)


def test_a_task_adapts_by_gradient_descent_on_its_support_rows(tmp_path: Path) -> None:
    """Against a loop over plain autograd: one dense table row after another, weights and all."""
    tables = write_random_model(tmp_path / "model", loss="mse")
    served = gmeta.load(tmp_path / "model")
    support, query = random_rows(6, seed=4), random_rows(5, seed=5)
    layers = load_file(tmp_path / "model" / "layers.safetensors")
    expected = slow_prediction({**layers, **tables}, support, query)
    found = served.adapt(support).predict(query)
    # Float32 sums in another order: relative, since the logits of this task stand around 14.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert float((found - served.predict(query)).abs().max()) > 0.01


def slow_prediction(
    trained: dict[str, torch.Tensor], support: pa.Table, query: pa.Table
) -> torch.Tensor:
    """Two steps of rate 0.3 on all values of the DLRM and of its tables, then the query rows."""
    values = {name: value.clone() for name, value in trained.items()}

    def outputs(rows: pa.Table) -> torch.Tensor:
        return torch.stack([one(row) for row in rows.to_pylist()])

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return values[f"model.{name}.weight"] @ x + values[f"model.{name}.bias"]

    def mean(table: str, ids: list[int]) -> torch.Tensor:
        return values[table][ids].mean(0) if ids else torch.zeros(4)

    def one(row: dict[str, Any]) -> torch.Tensor:
        price = torch.tensor([row["price"]], dtype=torch.float32)
        hidden = torch.relu(linear("bottom.0", price))
        bottom = torch.relu(linear("bottom.2", hidden))
        v = [bottom, values["item"][row["item"]], values["city"][row["city"]]]
        v += [mean("tag", row["tags"]), mean("item", row["seen"])]
        dots = [v[i] @ v[j] for i in range(5) for j in range(i)]
        top = torch.cat([bottom, torch.stack(dots)])
        return linear("top.2", torch.relu(linear("top.0", top)))[0]

    label = torch.tensor(support["click"].to_pylist(), dtype=torch.float32)
    for _ in range(2):
        for value in values.values():
            value.requires_grad_()
        loss = (outputs(support) - label).square().mean()
        grads = torch.autograd.grad(loss, list(values.values()), allow_unused=True)
        pairs = zip(values.items(), grads, strict=True)
        values = {n: (v - 0.3 * g if g is not None else v).detach() for (n, v), g in pairs}
    return outputs(query).detach()


def test_rows_may_come_as_lists_arrays_tensors_or_arrow(served: ServedModel) -> None:
    rows = random_rows(7, seed=6)
    plain = {name: rows[name].to_pylist() for name in rows.column_names}
    mixed = {**plain, "item": rows["item"].to_numpy(), "price": torch.tensor(plain["price"])}
    extra = rows.append_column("unused", pa.array([None] * 7))
    expected = served.adapt(rows).predict(rows)
    for given in (plain, mixed, extra, extra.to_batches()[0], rows.drop_columns(["user"])):
        assert torch.equal(served.adapt(given).predict(given), expected)


def test_no_rows_are_no_predictions(served: ServedModel) -> None:
    none = random_rows(0)
    assert served.predict(none).tolist() == []
    assert served.adapt(random_rows(3)).predict(none).tolist() == []
    assert served.predict_tasks(none, none).after_N.tolist() == []


def test_a_model_serves_in_inference_mode_and_threads(served: ServedModel, exported: Path) -> None:
    supports = [random_rows(8, seed=seed) for seed in range(12)]
    query = random_rows(9, seed=100)
    expected = [served.adapt(support).predict(query) for support in supports]
    start = threading.Barrier(4)
    with torch.inference_mode():
        loaded = gmeta.load(exported)
    assert torch.equal(loaded.adapt(supports[0]).predict(query), expected[0])

    @torch.inference_mode()
    def adapt_and_predict(index: int) -> torch.Tensor:
        if index < 4:
            start.wait()
        return served.adapt(supports[index]).predict(query)

    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(adapt_and_predict, range(12)), expected, strict=True):
            assert torch.equal(found, wanted)


FORKED = """
import os, sys, threading
import gmeta, torch
from tests.support.exported import random_rows

torch.set_num_threads(2)
torch.ones(1 << 20).sum()  # its threads are there
model, rows = gmeta.load(sys.argv[1]), random_rows(3_000)
expected = model.adapt(rows).predict(rows)
is_over = threading.Event()


def compute():
    while not is_over.is_set():
        model.adapt(rows)


threading.Thread(target=compute, daemon=True).start()
for _ in range(5):
    child = os.fork()
    if not child:
        os._exit(not torch.allclose(model.adapt(rows).predict(rows), expected, atol=1e-5))
    print(os.waitpid(child, 0)[1])
is_over.set()
"""


def test_a_process_that_is_forked_while_its_model_computes_answers_too(exported: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKED, exported], capture_output=True, text=True,
        timeout=PATIENCE_S, check=False, env=environment(),
    )  # fmt: skip
    assert ran.stdout.split() == ["0"] * 5, ran.stderr


def test_a_caller_under_autocast_gets_the_same_numbers(served: ServedModel) -> None:
    support, query = random_rows(8, seed=1), random_rows(9, seed=2)
    expected = served.adapt(support).predict(query), served.predict(query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = served.adapt(support).predict(query), served.predict(query)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("as_context", [False, True])
def test_a_caller_with_another_default_device_gets_the_same_numbers(
    served: ServedModel, exported: Path, as_context: bool
) -> None:
    support, query = random_rows(20, seed=1, num_tasks=3), random_rows(20, seed=2, num_tasks=3)
    one = of_task(support, 1)

    def answers(model: ServedModel) -> list[torch.Tensor]:
        both = model.predict_tasks(support, query)
        return [model.adapt(one).predict(query), model.predict(query), both.before_N, both.after_N]

    expected = answers(served)
    try:
        if as_context:
            with torch.device("meta"):
                found = [answers(model) for model in (served, gmeta.load(exported))]
                assert torch.empty(0).device.type == "meta"
        else:
            torch.set_default_device("meta")
            found = [answers(model) for model in (served, gmeta.load(exported))]
            assert torch.empty(0).device.type == "meta"
    finally:
        torch.set_default_device(None)
    for each in found:
        assert all(map(torch.equal, each, expected))


FRESH = """
import sys
import gmeta
assert not {"torch", "numpy", "pyarrow"} & set(sys.modules), "importing gmeta is not cheap"
model = gmeta.load(sys.argv[1])
rows = {"item": [1, 2], "city": [3, 4], "tags": [[5], []], "seen": [[], [1]], "price": [0.1, 0.2]}
task = model.adapt({**rows, "click": [0, 1]})
print(*task.predict(rows).tolist(), *model.predict(rows).tolist())
import torch
assert not torch.distributed.is_initialized()
names = list(sys.modules)
assert names.index("numpy") < names.index("torch.version"), "numpy's import may lose a Ctrl-C"
print(*(name for name in ("torchrec", "fbgemm_gpu", "duckdb", "matplotlib") if name in sys.modules))
"""


def test_a_fresh_process_serves_without_torchrec_fbgemm_or_a_process_group(
    served: ServedModel, exported: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FRESH, str(exported)], capture_output=True, text=True,
        env=environment(), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    numbers, loaded = result.stdout.splitlines()
    rows = {
        "item": [1, 2], "city": [3, 4], "tags": [[5], []], "seen": [[], [1]], "price": [0.1, 0.2],
    }  # fmt: skip
    expected = [*served.adapt({**rows, "click": [0, 1]}).predict(rows), *served.predict(rows)]
    found = [float(number) for number in numbers.split()]
    assert found == pytest.approx([float(value) for value in expected], abs=1e-6)
    assert loaded == ""


NEEDED = "item, city, tags, seen, price"
WRONG_ROWS: dict[str, tuple[Callable[[pa.Table], object], type[Exception], str]] = {
    "no rows": (
        lambda rows: rows[:0],
        UserError,
        "support has 0 rows: at least 1 is needed to adapt. "
        "Call predict of the model itself for a task of which nothing is known",
    ),
    "a missing column": (
        lambda rows: rows.drop_columns(["city"]),
        UserError,
        f"support rows have no column city; they have user, item, tags, seen, price, click. "
        f"This model reads {NEEDED}, click. Add the column",
    ),
    "a misspelt column": (
        lambda rows: rows.rename_columns(["user", "itm", "city", "tags", "seen", "price", "click"]),
        UserError,
        f"support rows have no column item; did you mean itm? "
        f"This model reads {NEEDED}, click. Add the column",
    ),
    "several tasks": (
        lambda rows: rows.set_column(0, "user", pa.array([1, 1, 2])),
        UserError,
        "support holds rows of 2 tasks: adapt takes those of 1. "
        "Call predict_tasks for many tasks at once",
    ),
    "text for ids": (
        lambda rows: rows.set_column(1, "item", pa.array(["a", "b", "c"])),
        DataError,
        "sparse column item has type string; ids of table item are needed, since the model's "
        "dataset was prepared without a schema. Encode the column as prepare did",
    ),
    "an id outside its table": (
        lambda rows: rows.set_column(1, "item", pa.array([1, 50, 2])),
        DataError,
        "column item holds id 50; table item has ids 0 to 49. "
        "Use 0 for values that the table does not know",
    ),
    "one id for a list": (
        lambda rows: rows.set_column(3, "tags", pa.array([1, 2, 3])),
        DataError,
        "multi column tags has type int64; a list of ids is needed. "
        "Make each value a list, such as [3, 17]",
    ),
    "a null": (
        lambda rows: rows.set_column(2, "city", pa.array([1, None, 2])),
        DataError,
        "column city has 1 null; none are allowed. "
        "Remove those rows, or use id 0, which stands for unknown values",
    ),
    "no number": (
        lambda rows: rows.set_column(5, "price", pa.array([1.0, float("nan"), 2.0])),
        DataError,
        "dense column price holds nan; finite numbers up to 3.4e38 are needed. "
        "Replace those values",
    ),
    "a label that is no click": (
        lambda rows: rows.set_column(6, "click", pa.array([0, 5, 1])),
        UserError,
        "label column click holds 5: this model takes 0 to 1, since it predicts clicks. "
        "Correct the label",
    ),
    "a column twice": (
        lambda rows: rows.append_column("item", rows["city"]),
        UserError,
        "support rows have 2 columns item: one is needed. Rename or drop the others",
    ),
}


def test_tasks_of_integers_on_one_side_and_text_on_the_other_fail(served: ServedModel) -> None:
    """Not taken for tasks without support, which --allow-no-support would let pass."""
    support, query = random_rows(9, num_tasks=2), random_rows(9, num_tasks=2)
    text = query.set_column(0, "user", query["user"].cast(pa.string()))
    assert catch_message(UserError, served.predict_tasks, support, text, allow_no_support=True) == (
        "task column user holds integer in the support rows and text in the query rows: no task "
        "would find its support. Cast one of them"
    )
    nobody = {name: [] for name in support.column_names}  # of no type at all
    assert served.predict_tasks(nobody, query, allow_no_support=True).support_rows_N.sum() == 0


@pytest.mark.parametrize("fault", WRONG_ROWS)
def test_wrong_rows_are_refused_in_one_line(served: ServedModel, fault: str) -> None:
    damage, kind, message = WRONG_ROWS[fault]
    with pytest.raises(kind) as caught:
        served.adapt(damage(random_rows(3)))
    assert str(caught.value) == message
    assert type(caught.value) is kind


def test_tasks_without_support_rows_are_told_unless_allowed(served: ServedModel) -> None:
    support, query = of_task(random_rows(50, num_tasks=3), 1), random_rows(50, num_tasks=3)
    message = catch_message(UserError, served.predict_tasks, support, query)
    row = next(row for row, user in enumerate(query["user"].to_pylist()) if user != 1)
    assert message == (
        f"2 of the 3 query tasks have 0 support rows, the first of them in query row {row}: "
        "they cannot adapt. Add their support rows, or allow them to be predicted without "
        "adaptation (--allow-no-support)"
    )
    found = served.predict_tasks(support, query, allow_no_support=True)
    unknown_N = found.support_rows_N == 0
    assert torch.equal(found.after_N[unknown_N], found.before_N[unknown_N])


def test_predict_says_what_is_wrong_with_its_files(exported: Path, tmp_path: Path) -> None:
    names = ("support", "query", "empty", "cut", "taken")
    support, query, empty, cut_short, taken = (tmp_path / f"{name}.parquet" for name in names)
    rows = random_rows(20, num_tasks=2)
    pq.write_table(rows, support)
    pq.write_table(rows.drop_columns(["click"]), query)
    pq.write_table(rows[:0], empty)
    cut_short.write_bytes(support.read_bytes()[:-8])
    pq.write_table(rows.append_column("prediction", rows["click"]), taken)
    cases = {
        (support, tmp_path / "none"): f"{tmp_path / 'none'} does not exist. Check the path",
        (support, taken): f"{taken} has a column prediction already: the output would have two of "
        "them. Rename or drop it",
        (query, query): f"support rows have no column click; they have user, item, city, tags, "
        f"seen, price. This model reads user, {NEEDED}, click. Add the column",
        (empty, query): "2 of the 2 query tasks have 0 support rows, the first of them in query "
        "row 0: they cannot adapt. Add their support rows, or "
        "allow them to be predicted without adaptation (--allow-no-support)",
    }
    runner = CliRunner()
    for paths, message in cases.items():
        out = tmp_path / "out.parquet"
        result = runner.invoke(app, ["predict", *map(str, (exported, *paths)), "--out", str(out)])
        assert isinstance(result.exception, UserError)
        assert str(result.exception) == message
        assert not out.exists()
    result = runner.invoke(app, ["predict", *map(str, (exported, cut_short, query))])
    told = str(result.exception)
    assert told.startswith(f"{cut_short} cannot be read as Parquet: ")  # then pyarrow's reason
    assert told.endswith(" is not a parquet file. Give a Parquet file that is whole")
    for what, own in (("SUPPORT", support), ("QUERY", query)):
        before = own.read_bytes()
        result = runner.invoke(
            app, ["predict", *map(str, (exported, support, query)), "--out", str(own)]
        )
        assert str(result.exception) == (
            f"--out = {str(own)!r} is {what}, whose rows would be replaced. Name another file"
        )
        assert own.read_bytes() == before
    arguments = ["predict", *map(str, (exported, empty, query)), "--allow-no-support", "--out"]
    result = runner.invoke(app, [*arguments, str(tmp_path / "out.parquet")])
    assert result.exit_code == 0, result.exception
    assert re.fullmatch(
        rf"predicted: {tmp_path}/out\.parquet  \(20 rows, 20 of them without support rows and so "
        r"not adapted, in \d+\.\d\d s\)",
        result.stderr.strip(),
    )
    out = tmp_path / "out.parquet"
    found, written = pq.read_table(out), out.read_bytes()
    seen = found.column_names
    assert seen == [*query_names(query), "prediction", "prediction_before", "support_rows"]
    assert found["prediction"].equals(found["prediction_before"])
    assert set(found["support_rows"].to_pylist()) == {0}
    kinds = "ends with .xlsx: .parquet, .pq and .csv can be written. Name a file that ends with"
    for name, message in (
        ("out.parquet", "exists already. Name another file, or pass --overwrite to replace it"),
        ("out.xlsx", f"{kinds} one of them"),
    ):
        result = runner.invoke(app, [*arguments, str(tmp_path / name)])
        assert str(result.exception) == f"--out = '{tmp_path / name}' {message}"
    assert out.read_bytes() == written
    assert not (tmp_path / "out.xlsx").exists()
    out.write_bytes(b"")
    assert runner.invoke(app, [*arguments, str(out), "--overwrite"]).exit_code == 0
    assert pq.read_table(out).equals(found)


def query_names(path: Path) -> list[str]:
    return list(pq.read_schema(path).names)


def test_lists_of_ids_from_2_to_the_63_are_read() -> None:
    rows = {"item": [2**64 - 1, 3], "tags": [[], [2**64 - 1, 1]]}
    table = as_table(rows, "query")
    assert table.schema.types == [pa.uint64(), pa.list_(pa.uint64())]
    assert table.to_pydict() == rows


def test_another_default_dtype_is_refused_in_one_line(served: ServedModel) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert catch_message(UserError, served.predict, random_rows(2)) == (
            "torch's default dtype is torch.float64; models compute in torch.float32. Call "
            "torch.set_default_dtype(torch.float32) before"
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_integer_beyond_64_bits_is_refused_and_a_parameter_is_read(served: ServedModel) -> None:
    rows = random_rows(2).to_pydict()
    assert catch_message(UserError, served.predict, {**rows, "item": [2**70, 1]}).startswith(
        "column item of the query rows, of type list, cannot be read: Python int too large to "
    )
    price = torch.tensor(rows["price"], requires_grad=True)
    assert torch.equal(served.predict({**rows, "price": price}), served.predict(rows))
