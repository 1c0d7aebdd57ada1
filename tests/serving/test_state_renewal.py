"""States that carry their support rows: another version of the model adapts them anew, as it would
adapt to the rows themselves; in a program, in bulk and in a server."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import SupportFeaturesConfig
from gmeta.errors import UserError
from gmeta.runs.build import build_learner
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig, vocabulary_file
from gmeta.serving.offline import adapt_job
from gmeta.serving.offline.adapt_job import MODEL_KEY, adapt_files, renew_files
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.server_limits import RequestLimits
from gmeta.serving.state_bytes import pack_rows, to_bytes
from gmeta_models import ModelConfig
from metaio.prepare.schema.schema import make_features
from metaio.prepare.schema.schema_file import parse_schema
from tests.serving.server.serving import post, request_of, service_of, tensors, values
from tests.serving.server.test_grpc import infer, message
from tests.support.commands import gmeta as command
from tests.support.exported import random_rows, write_random_model
from tests.support.refusals import catch_message

SUPPORT, QUERY = random_rows(9, seed=1), random_rows(6, seed=2)
TASKS = 30


def write_version(
    folder: Path, rate: float, words: dict[str, list[Any]], moments: dict[str, tuple[float, float]],
    hashed: int = 100,
) -> ServedModel:  # fmt: skip
    """A version of a model of raw columns, whose words stand in other rows in each version."""
    schema = parse_schema(
        {
            "task": {"column": "user"}, "label": {"column": "click"},
            "single": [
                {"column": "shop", "hash": hashed}, {"column": "item", "vocabulary": 1},
                {"column": "city", "vocabulary": 1},
            ],
            "multi": [{"column": "seen", "vocabulary": 1, "table": "item"}],
            "dense": [{"column": "time", "standardise": True}, {"column": "price"}],
            "episodes": {"by": "last", "query_rows": 1},
        }
    )  # fmt: skip
    kinds: Any = {"shop": "integer", "item": "integer", "city": "text", "seen": "integer"}
    sizes = {table: len(values) for table, values in words.items()}
    config = ExportedConfig(
        model=ModelConfig(embedding_dim=4, hidden=(8,)),
        algorithm=AlgorithmConfig(inner_lr=rate), loss="bce",
        features=make_features(schema, sizes),
        columns=ExportedColumns("user", "click", schema, moments, kinds),
        table_format="float32", source={}, files={},
    )  # fmt: skip
    (folder / "vocabulary").mkdir(parents=True)
    for table, known in words.items():
        pq.write_table(pa.table({"value": pa.array(known)}), folder / vocabulary_file(table))
    torch.manual_seed(int(rate * 10))
    learner = build_learner(config.features, config.model, config.algorithm, config.loss)
    rows = {table.name: table.num_rows for table in config.features.tables}
    write_model(
        folder, config, learner.state_dict(), lambda name: torch.randn(rows[name], 4)
    )  # fmt: skip
    return gmeta.load(folder)


def raw_rows(num_rows: int, seed: int = 0) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "shop": rng.integers(-9, 99, num_rows).tolist(),
        "item": rng.integers(0, 40, num_rows).tolist(),  # 0 is a value as any other
        "city": rng.choice(["x", "y", "z"], num_rows).tolist(),
        "seen": [rng.integers(0, 40, size).tolist() for size in rng.integers(0, 4, num_rows)],
        "time": (1.7e9 + 1e4 * rng.standard_normal(num_rows)).tolist(),
        "price": rng.random(num_rows).tolist(),
        "click": rng.integers(0, 2, num_rows).tolist(),
    }


def test_another_version_adapts_to_the_rows_that_a_state_carries(tmp_path: Path) -> None:
    """Its vocabularies are in another order, know more and less; its moments are others."""
    ids = list(range(40))
    old = write_version(
        tmp_path / "old", 0.3, {"item": ids, "city": ["x", "y", "z"]}, {"time": (1.7e9, 9e3)}
    )
    new = write_version(
        tmp_path / "new", 0.5, {"item": [77, *ids[:4:-1]], "city": ["w", "z", "x"]},
        {"time": (1.70001e9, 2e4)},
    )  # fmt: skip
    support, query = raw_rows(8), raw_rows(5, seed=1)
    state = old.adapt(support).state(with_support=True)
    assert torch.equal(old.task(state).predict(query), old.adapt(support).predict(query))
    renewed, expected = new.task(state), new.adapt(support).predict(query)
    assert torch.equal(renewed.predict(query), expected)
    assert (expected - new.predict(query)).abs().max() > 1e-3
    assert [old.task(state).is_current, renewed.is_current] == [True, False]
    # Kept again, it is of the newer version, and renewable once more.
    again = new.task(renewed.state(with_support=True))
    assert again.is_current
    assert torch.equal(again.predict(query), expected)
    assert again.state(with_support=True) == renewed.state(with_support=True)
    # Versions overlap: the older one takes the newer one's state.
    older = old.task(renewed.state(with_support=True))
    assert older.predict(query).isfinite().all()


def test_what_no_version_can_renew_is_refused_in_a_line(tmp_path: Path) -> None:
    words, moments = {"item": [1, 2], "city": ["x"]}, {"time": (1.7e9, 9e3)}
    old, new, other = (
        write_version(tmp_path / name, rate, words, moments, hashed)
        for name, rate, hashed in (("old", 0.3, 100), ("new", 0.5, 100), ("other", 0.3, 50))
    )
    task = old.adapt(raw_rows(4))
    of_both = f"a task's state is of the exported model {old.checksum}; this one is "
    remedy = "Adapt the task anew by its support rows, or load the model that it was adapted with"
    assert catch_message(UserError, new.task, task.state()) == (
        f"{of_both}{new.checksum}, and it carries no support rows. {remedy}"
    )
    assert catch_message(UserError, other.task, task.state(with_support=True)) == (
        f"{of_both}{other.checksum}, and it carries support rows of other columns. {remedy}"
    )
    bare = old.task(task.state())
    assert catch_message(UserError, bare.state, True) == (
        "the task was read from a state that carries no support rows. Adapt it by its rows, or "
        "leave out with_support"
    )


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of table ids, whose support rows also have statistics."""
    root = tmp_path_factory.mktemp("versions")
    statistics = SupportFeaturesConfig(task=True, columns=("tags",), label_prior=(0.5, 0.5))
    for name, rate in (("old", 0.3), ("new", 0.5)):
        write_random_model(
            root / name,
            algorithm=AlgorithmConfig(inner_lr=rate, adapt_embeddings=True),
            support_features=statistics,
        )
    return root / "old", root / "new"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_bulk_states_are_renewed_to_those_of_their_rows(
    versions: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    # Several chunks and several reads.
    monkeypatch.setattr(adapt_job, "CHUNK_ROWS", 20)
    monkeypatch.setattr(adapt_job, "_STATES_AT_ONCE", 7)
    old, new = versions
    rows, states, out = (tmp_path / name for name in ("rows.parquet", "s.parquet", "new.parquet"))
    pq.write_table(random_rows(200, seed=3, num_tasks=TASKS), rows)
    wrote = command("adapt", old, rows, "--out", states, "--with-support")
    assert wrote.returncode == 0, wrote.stderr
    options = ("--out", out, "--processes", processes)
    renewed = command("adapt", new, "--from", states, *options)
    assert renewed.returncode == 0, renewed.stderr
    assert f"({TASKS} tasks of 200 rows" in renewed.stderr
    anew = tmp_path / "anew.parquet"
    adapt_files(new, [str(rows)], anew, 1, True, lambda *_: None, with_support=True)
    found, expected = (pq.read_table(file).sort_by("task") for file in (out, anew))
    assert found["task"].equals(expected["task"])
    assert found["rows"].equals(expected["rows"])
    model = gmeta.load(new)
    assert found.schema.metadata[MODEL_KEY].decode() == model.checksum
    for mine, theirs in zip(found["state"].to_pylist(), expected["state"].to_pylist(), strict=True):
        # Tasks share other batches there, whose sums are added up in another order.
        predictions = [model.task(state).predict(QUERY) for state in (mine, theirs)]
        torch.testing.assert_close(*predictions, rtol=0, atol=1e-6)


def test_states_without_rows_are_not_renewed(versions: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = versions
    rows, states, out = (tmp_path / name for name in ("rows.parquet", "s.parquet", "new.parquet"))
    pq.write_table(random_rows(40, seed=3, num_tasks=4), rows)
    adapt_files(old, [str(rows)], states, 1, True, lambda *_: None)
    message_ = catch_message(UserError, renew_files, new, str(states), out, 1, True, print)
    assert message_.startswith("task ")
    assert "and it carries no support rows. Adapt the task anew" in message_
    assert not out.exists()
    assert "has no column task: --from takes the file" in catch_message(
        UserError, renew_files, new, str(rows), out, 1, True, print
    )
    both = command("adapt", new, rows, "--from", states, "--out", out)
    assert "adapt takes SUPPORT, the rows to adapt by, or --from" in both.stderr


def test_no_altered_or_huge_rows_are_adapted_to(
    versions: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = map(gmeta.load, versions)
    state = old.adapt(SUPPORT).state(with_support=True)
    rows = new.read_support(state)
    for wrong, told in (
        ({"ids_NF": rows.ids_NF + 1_000}, "a support row has an id that its table does not have"),
        ({"dense_NK": rows.dense_NK * np.float32("inf")}, "dense_NK holds a value that is not fin"),
        ({"label_N": rows.label_N[:1]}, "task_N is int64 [9]"),
    ):
        packed = pack_rows(replace(rows, **wrong), new._encoder.translation)
        signed = to_bytes(old.adapt(SUPPORT)._state, old.checksum, packed)
        assert told in catch_message(UserError, new.task, signed)
    other_unit = replace(rows, label_N=rows.label_N + 7)
    signed = to_bytes(
        old.adapt(SUPPORT)._state, old.checksum, pack_rows(other_unit, new._encoder.translation)
    )
    assert "label column click holds 8" in catch_message(UserError, new.task, signed)
    monkeypatch.setattr("gmeta.serving.state_bytes._MOST_RENEWAL_BYTES", 64)
    assert "its support rows take more than 64 bytes" in catch_message(UserError, new.task, state)


@pytest.fixture
def service(versions: tuple[Path, Path]) -> Iterator[InferenceService]:
    with service_of(versions[1]) as found:
        yield found


def with_state(state: bytes) -> dict[str, Any]:
    return {"parameters": {"task_state": base64.b64encode(state).decode()}}


def test_a_server_takes_a_state_and_gives_a_renewed_one_back(
    service: InferenceService, versions: tuple[Path, Path]
) -> None:
    old, new = map(gmeta.load, versions)
    expected = new.adapt(SUPPORT).predict(QUERY).numpy()
    adapted = post(
        service, {**request_of(QUERY, SUPPORT), "parameters": {"return_state": True}}
    ).json()["parameters"]
    renewed = post(service, request_of(QUERY) | with_state(old.adapt(SUPPORT).state(True)))
    told = renewed.json()["parameters"]
    assert (told["task_cache"], told["support_rows"]) == ("renewed", 9)
    np.testing.assert_allclose(values(renewed), expected, rtol=0, atol=1e-6)
    for state in (told["task_state"], adapted["task_state"]):
        again = post(service, request_of(QUERY) | with_state(base64.b64decode(state)))
        np.testing.assert_allclose(values(again), expected, rtol=0, atol=1e-6)
        # It is of the version that answers: nothing new to keep.
        assert again.json()["parameters"] == {"support_rows": 0, "task_cache": "kept"}
    call = message(request_of(QUERY) | with_state(old.adapt(SUPPORT).state(True)))
    found = infer(service, call).parameters
    assert found["task_cache"].string_param == "renewed"
    assert found["task_state"].string_param == told["task_state"]


def test_a_state_that_cannot_be_taken_is_a_line(versions: tuple[Path, Path]) -> None:
    old = gmeta.load(versions[0])
    task = old.adapt(SUPPORT)
    with service_of(versions[1], limits=RequestLimits(rows=8)) as service:
        for request, told in (
            (request_of(QUERY) | with_state(task.state()), "it carries no support rows"),
            (request_of(QUERY) | with_state(task.state(True)), "carries 9 support rows; at most 8"),
            (request_of(QUERY) | with_state(b"what"), "a task's state begins with b'what'"),
            (request_of(QUERY) | {"parameters": {"task_state": "*"}}, "task_state is '*'; a task"),
            (request_of(QUERY) | {"parameters": {"return_state": True}}, "return_state is True"),
            (
                request_of(QUERY.slice(0, 1), SUPPORT.slice(0, 2)) | with_state(task.state(True)),
                "a task is known by one of them",
            ),
        ):
            answer = post(service, request)
            assert answer.status_code in (400, 413)
            assert told in answer.json()["error"]
        two = {"name": "task.lengths", "datatype": "INT64", "shape": [2], "data": [3, 3]}
        inputs = [*tensors(QUERY.drop_columns(["user", "click"])), two]
        answer = post(service, {"inputs": inputs} | with_state(task.state(True)))
        assert "of 2 tasks, and parameter task_state of one" in answer.json()["error"]
