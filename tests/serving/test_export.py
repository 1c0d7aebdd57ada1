"""Export of trained runs: what is served equals what is evaluated; nothing half-written is left."""

import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import gmeta
from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.cli.commands.console import size_text
from gmeta.cli.main import app
from gmeta.config.algorithm import PLAIN
from gmeta.errors import GMetaError, NotFiniteError, UserError
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.runs.run_folder import list_checkpoints
from gmeta.serving import export
from gmeta.serving.export import CheckpointReader, export_run
from gmeta.serving.exported_folder import LAYERS_FILE, read_config
from gmeta.serving.finite_values import check_layers
from gmeta.serving.formats.export_runtime import export_for
from gmeta_models import MODELS, InputSizes, ModelConfig
from gmeta_models.dlrm import DLRM
from gmeta_models.options import DlrmOptions
from metaio import FormatError, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.commands import SMALL_MODEL, evaluate, succeed, write_config
from tests.support.commands import gmeta as run_gmeta
from tests.support.exported import evaluated, rows_of_split
from tests.support.refusals import catch_message
from tests.support.sealed import seal

SPLIT = "user-item-cold"
LAYER = "model.learner.model.top.0.weight"
SCHEMA = {
    "task": {"column": "user"},
    "label": {"column": "stars", "threshold": 4.0},
    "time": {"column": "at"},
    "single": [
        # Names that no module of torch can have.
        {"column": "shop.name", "vocabulary": 2, "null": "unknown"},
        {"column": "type", "hash": 64},
        {"column": "user", "hash": 32},
    ],
    "multi": [{"column": "items", "vocabulary": 1, "separator": "|"}],
    "dense": [{"column": "price", "log1p": True, "standardise": True, "fill": 5.0}],
    "episodes": {"by": "last", "query_rows": 3, "min_rows": 5},
    "splits": {"shares": {"train": 0.7, "test": 0.3}},
}

OWN_HISTORY = """
import torch
from torch import nn


class History(nn.Module):
    def __init__(self, config, sizes):
        super().__init__()
        self.late = None
        self.head = nn.Linear(config.embedding_dim, sizes.outputs)

    def forward(self, inputs):
        values_NHD = inputs.bags_NHD(0).values_NHD
        last_ND = values_NHD.amax(1) if values_NHD.shape[1] else inputs.single_NFD[:, 0]
        if self.late is None:
            self.late = nn.Linear(*2 * (last_ND.shape[1],))
        return self.head(self.late(last_ND))[:, 0]
"""
RATING = "evaluation.positive_rating=3.5"  # of clicks it says nothing


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, click_logs: Path) -> Path:
    """Two ranks' run on table ids: two checkpoints of two shards each."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "train.toml", click_logs, folder / "run")
    return _trained(config, "run.checkpoint_every_steps=4", "--nproc-per-node=2", RATING)


@pytest.fixture(scope="module")
def raw_rows() -> pa.Table:
    """Ratings of 60 users by raw columns: text, integers, nulls, lists as text, a skewed price."""
    rng = np.random.default_rng(3)
    user = np.repeat(np.arange(1_000, 1_060), rng.integers(5, 14, 60))
    count = len(user)
    shops = [None if n == 9 else f"shop {n}" for n in rng.integers(0, 10, count)]
    tags = ["|".join(rng.choice(["new", "red", "big"], size)) for size in rng.integers(0, 3, count)]
    price = rng.lognormal(2, 1, count)
    return pa.table(
        {
            "user": user, "stars": rng.integers(1, 6, count), "at": rng.permutation(count),
            "shop.name": shops, "type": rng.integers(0, 500, count), "items": tags,
            "price": pa.array(price, mask=rng.random(count) < 0.1),
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def raw_run(tmp_path_factory: pytest.TempPathFactory, raw_rows: pa.Table) -> Path:
    """A run on those ratings, prepared by a schema."""
    folder = tmp_path_factory.mktemp("raw")
    pq.write_table(raw_rows, folder / "ratings.parquet")
    schema = parse_schema(cast("dict[str, object]", SCHEMA))
    prepare([str(folder / "ratings.parquet")], str(folder / "data"), schema)
    return _trained(write_config(folder / "train.toml", folder / "data", folder / "run"))


def _trained(config: Path, *arguments: str) -> Path:
    succeed("train", config, *SMALL_MODEL, *arguments)
    return config.parent / "run"


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's newest checkpoint, exported."""
    out = tmp_path_factory.mktemp("exported") / "model"
    export_run(run, out)
    return out


@contextmanager
def gone(folder: Path) -> Iterator[None]:
    """Inside, there is no such folder."""
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    yield
    elsewhere.rename(folder)


def difference(ours: object, theirs: pa.ChunkedArray) -> float:
    return float(np.abs(np.asarray(ours) - theirs.to_numpy()).max())


@pytest.fixture(scope="module")
def informed_run(tmp_path_factory: pytest.TempPathFactory, click_logs: Path) -> Path:
    """Two ranks' run with statistics of support rows, drawn anew in training, of items and of their
    neighbours, whose rare rows share a vector."""
    folder = tmp_path_factory.mktemp("informed")
    config = write_config(folder / "train.toml", click_logs, folder / "run")
    keys = ("support_features.task=true", 'support_features.columns=["*"]', "outer.loss=mae")
    items = 'item_features.columns=["*"]', "item_features.shrinkage=2"
    items += ("support_features.residual_of=item", "neighbours.column=item", "neighbours.count=6")
    return _trained(
        config,
        *keys,
        *items,
        "augment.resplit_support=true",
        "model.admission=[2,0]",
        "--nproc-per-node=2",
    )


@pytest.mark.distributed
def test_statistics_of_support_rows_are_exported_with_their_prior(
    informed_run: Path, tmp_path: Path, click_logs: Path
) -> None:
    export_run(informed_run, tmp_path / "model")
    label_N = open_dataset(str(click_logs)).read_block("train", 0).label_N
    config = read_config(tmp_path / "model")
    found = config.support_features.label_prior
    assert found == pytest.approx((float(label_N.mean()), float(label_N.std())), rel=1e-5)
    assert_served_as_evaluated(informed_run, tmp_path / "model", click_logs)


@pytest.mark.distributed
def test_statistics_are_exported(informed_run: Path, tmp_path: Path, click_logs: Path) -> None:
    """Those of all training rows, whichever rank read them: against a loop over the rows."""
    export_run(informed_run, tmp_path / "model")
    dataset = open_dataset(str(click_logs))
    label_of: dict[int, list[float]] = defaultdict(list)
    for number in range(dataset.split("train").num_blocks):
        block = dataset.read_block("train", number)
        for row, label in enumerate(block.label_N.tolist()):
            label_of[int(block.unique_ids_U[block.positions_NF[row, 0]])].append(label)
    every = [label for labels in label_of.values() for label in labels]
    mean, deviation = statistics.fmean(every), statistics.pstdev(every)
    assert read_config(tmp_path / "model").item_features.shrinkage == 2
    values_V2 = load_file(tmp_path / "model" / LAYERS_FILE)["items.column_0"]
    assert len([one for one in label_of if one]) > 10
    for one, (above, shown) in enumerate(values_V2.tolist()):
        labels = label_of[one] if one else []
        expected = sum(label - mean for label in labels) / deviation / (len(labels) + 2)
        assert above == pytest.approx(expected, abs=1e-6)
        assert shown == pytest.approx(math.log(1 + len(labels)) / math.log(101))


@pytest.mark.distributed
def test_a_served_model_predicts_as_evaluate(run: Path, model: Path, click_logs: Path) -> None:
    assert_served_as_evaluated(run, model, click_logs)


def assert_served_as_evaluated(run: Path, model: Path, click_logs: Path) -> None:
    expected = evaluated(run, SPLIT)
    support, query = rows_of_split(click_logs, SPLIT)
    served = gmeta.load(model)
    found = served.predict_tasks(support, query)
    assert difference(found.before_N, expected["before"]) < 1e-6
    assert difference(found.after_N, expected["after"]) < 1e-6
    assert difference(found.after_N, expected["before"]) > 1e-3
    assert found.support_rows_N.tolist() == expected["support_rows"].to_pylist()
    assert difference(served.predict(query), expected["before"]) < 1e-6
    for task in set(query["user"].to_pylist()):
        mine, yours = (one.filter(pa.compute.equal(one["user"], task)) for one in (support, query))
        wanted = expected.filter(pa.compute.equal(expected["task"], task))["after"]
        assert difference(served.adapt(mine).predict(yours), wanted) < 1e-6


@pytest.mark.distributed
def test_raw_columns_are_as_prepared(raw_run: Path, raw_rows: pa.Table, tmp_path: Path) -> None:
    exported = CliRunner().invoke(app, ["export", str(raw_run), str(tmp_path / "model")])
    assert exported.exit_code == 0, exported.exception
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "model").rglob("*.*")}
    of_tables = sum(size for name, size in sizes.items() if name.startswith("table-"))
    tables = open_dataset(str(raw_run.parent / "data")).features.tables
    trained = 4 * 4 * sum(table.num_rows for table in tables)
    assert exported.stderr == (
        f"exported: {tmp_path}/model  (step 3, {size_text(sum(sizes.values()))}; tables float32, "
        f"{size_text(of_tables)}, {of_tables / trained:.2f} of what was trained)\n"
        f'use it: gmeta.load("{tmp_path}/model"), or gmeta predict {tmp_path}/model '
        "SUPPORT.parquet QUERY.parquet\n"
    )
    expected = evaluated(raw_run, "test")
    tasks = expected["task"].unique()
    ordered = raw_rows.sort_by([("user", "ascending"), ("at", "ascending")])
    ordered = ordered.filter(pa.compute.is_in(ordered["user"], tasks))
    users, sizes = np.unique(ordered["user"], return_counts=True)
    from_end = np.concatenate([np.arange(size)[::-1] for size in sizes])
    support, query = ordered.filter(from_end >= 3), ordered.filter(from_end < 3)
    pq.write_table(support.drop_columns(["at"]), tmp_path / "support.parquet")
    shuffled = query.take(np.random.default_rng(0).permutation(query.num_rows))
    pq.write_table(shuffled.drop_columns(["at", "stars"]), tmp_path / "query.parquet")
    paths = [tmp_path / name for name in ("model", "support.parquet", "query.parquet")]
    with gone(raw_run.parent / "data"):  # the model must not need it
        result = run_gmeta("predict", *paths, "--out", tmp_path / "out.parquet")
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path / 'out.parquet'}  ({query.num_rows} rows, in " in result.stderr
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.drop_columns(["prediction", "prediction_before", "support_rows"]).equals(
        shuffled.drop_columns(["at", "stars"])
    )
    assert len(users) == len(tasks) > 5
    for task in tasks:
        mine = found.filter(pa.compute.equal(found["user"], task))
        wanted = expected.filter(pa.compute.equal(expected["task"], task))
        # Rows of a task stand in another order here: as sets they must agree.
        for ours, theirs in (("prediction", "after"), ("prediction_before", "before")):
            np.testing.assert_allclose(
                np.sort(mine[ours]), np.sort(wanted[theirs]), rtol=0, atol=1e-6
            )


@pytest.mark.distributed
def test_any_step_kept_can_be_exported_and_replaces_a_model_only_when_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = list_checkpoints(run / "checkpoints")
    assert (old.name, new.name) == ("step-00000004", "step-00000008")
    out = tmp_path / "model"
    assert export_run(run, out, step=4).step == 4
    config = gmeta.load(out).config
    assert (config.source["step"], config.positive_rating) == (4, 3.5)
    with monkeypatch.context() as patched:
        patched.setattr(export, "CheckpointReader", None)  # told before it is read
        message = catch_message(UserError, export_run, run, out)
    assert message == (
        f"{out} holds an exported model already. "
        "Choose another folder, or pass --overwrite to replace it"
    )
    assert export_run(run, out, "int8", overwrite=True).step == 8
    assert gmeta.load(out).config.table_format == "int8"
    assert catch_message(UserError, export_run, run, tmp_path / "other", step=5) == (
        f"run {run} has no checkpoint of step 5: it has 4, 8. "
        "Choose one of them, or leave out --step"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.distributed
def test_a_run_is_exported_for_another_runtime_as_for_gmeta(
    run: Path, click_logs: Path, tmp_path: Path
) -> None:
    export_for(run, tmp_path / "clicks", "triton", "int8", step=4)
    export_run(run, tmp_path / "model", "int8", step=4)
    support, query = rows_of_split(click_logs, SPLIT)
    found, expected = (
        gmeta.load(folder).predict_tasks(support, query)
        for folder in (tmp_path / "clicks" / "1" / "model", tmp_path / "model")
    )
    assert torch.equal(found.after_N, expected.after_N)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clicks", "model"]
    assert catch_message(UserError, export_for, run, tmp_path / "clicks", "triton") == (
        f"{tmp_path / 'clicks'} holds an exported Triton model already. "
        "Choose another folder, or pass --overwrite to replace it"
    )


@pytest.mark.distributed
def test_smaller_tables_cost_little_accuracy(run: Path, click_logs: Path, tmp_path: Path) -> None:
    support, query = rows_of_split(click_logs, SPLIT)
    exact = None
    for table_format, share, error in (
        ("float32", 1.0, 0),
        ("float16", 0.5, 2e-3),
        ("int8", 0.5, 0.02),
    ):
        out = tmp_path / table_format
        written = export_run(run, out, table_format)
        # The safetensors header weighs on tables of 24 rows; the payload is what the format says.
        assert written.table_bytes < share * written.float32_table_bytes + 9 * 200
        after_N = gmeta.load(out).predict_tasks(support, query).after_N.numpy()
        exact = after_N if exact is None else exact
        assert np.abs(after_N - exact).max() <= error


def flip_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"no pickle")


def cut_shard(checkpoint: Path) -> None:
    shard = min(checkpoint.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:500])


def lose_shard(checkpoint: Path) -> None:
    min(checkpoint.glob("*.distcp")).unlink()


@pytest.mark.distributed
@pytest.mark.parametrize("damage", [flip_metadata, cut_shard, lose_shard])
def test_a_damaged_checkpoint_is_told_in_one_line_and_leaves_nothing(
    run: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    newest = list_checkpoints(copy / "checkpoints")[-1]
    damage(newest)
    told = catch_message(GMetaError, export_run, copy, tmp_path / "model")
    assert told.startswith(f"checkpoint {newest} cannot be read: ")  # then torch's reason
    assert told.endswith(
        ". Export an earlier one with --step, or remove it and train on from the one before"
    )
    assert len(told.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert export_run(copy, tmp_path / "model", step=4).step == 4


@pytest.mark.distributed
def test_any_wrong_bit_of_a_checkpoints_index_is_told_in_a_line(run: Path, tmp_path: Path) -> None:
    newest = list_checkpoints(run / "checkpoints")[-1]
    copy = Path(shutil.copytree(newest, tmp_path / newest.name))
    intact, rng = (copy / ".metadata").read_bytes(), np.random.default_rng(0)
    refusals = 0
    for _ in range(100):
        wrong = bytearray(intact)
        wrong[rng.integers(len(wrong))] ^= 1 << int(rng.integers(8))
        (copy / ".metadata").write_bytes(wrong)
        for read in (summarise_checkpoint, lambda path: CheckpointReader(path).read([LAYER])):
            try:
                read(copy)
            except GMetaError as error:
                refusals += str(error).startswith(f"checkpoint {copy} ")
    assert refusals > 50


@pytest.mark.distributed
def test_a_run_is_exported_only_with_its_own_dataset(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    environment = json.loads((copy / "environment.json").read_text())
    trained_on = environment["dataset_fingerprint"]
    (copy / "environment.json").write_text(json.dumps({"dataset_fingerprint": "0" * 32}))
    dataset = json.loads((copy / "config.json").read_text())["data"]["path"]
    assert catch_message(GMetaError, export_run, copy, tmp_path / "model") == (
        f"dataset {dataset} has fingerprint {trained_on[:12]}, run {copy} was trained on "
        "000000000000: its ids may mean other values. Bring back that dataset, or train on this one"
    )
    config = json.loads((copy / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "gone")
    (copy / "config.json").write_text(json.dumps(config))
    message = catch_message(GMetaError, export_run, copy, tmp_path / "model")
    told = f"run {copy} cannot be exported without its data: {tmp_path}/gone holds no dataset: "
    assert message.startswith(told)
    shutil.rmtree(copy / "checkpoints")
    assert catch_message(UserError, export_run, copy, tmp_path / "model") == (
        f"run {copy} has 0 checkpoints: there is nothing to export yet. Let it reach its first one"
    )


@pytest.mark.distributed
def test_a_checkpoint_of_another_model_is_not_exported(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = json.loads((copy / "config.json").read_text())
    config["model"]["hidden"] = [16, 8]
    (copy / "config.json").write_text(json.dumps(config))
    checkpoint = list_checkpoints(copy / "checkpoints")[-1]
    assert catch_message(UserError, export_run, copy, tmp_path / "model") == (
        f"model.hidden = [16, 8], but checkpoint {checkpoint} was trained with [16], and its "
        "weights mean nothing with another. Set it as it was, or train a new run, which may begin "
        "with run.start_from"
    )
    # One of an older release does not say with what it was trained.
    seal(checkpoint / "progress.json", lambda about: about.pop("config"))
    assert catch_message(GMetaError, export_run, copy, tmp_path / "model") == (
        f"checkpoint {checkpoint} has no tensor model.learner.model.top.4.weight: it is of another "
        "model than the run's config. Export a step of the same run"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("section", "name", "known"),
    [
        ("model", "mine", sorted([*MODELS, "dot"])),
        ("algorithm", "mimic", sorted([*ALGORITHMS, PLAIN])),
    ],
)
def test_a_run_of_a_package_that_is_not_here_is_told_from_a_mistyped_name(
    run: Path, tmp_path: Path, section: str, name: str, known: list[str]
) -> None:
    """To choose another model is no advice for weights that exist."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = json.loads((copy / "config.json").read_text())
    config[section]["name"] = name
    (copy / "config.json").write_text(json.dumps(config))
    for checkpoint in list_checkpoints(copy / "checkpoints"):
        seal(checkpoint / "progress.json", lambda about: about["config"][section].update(name=name))
    told = (
        f"{copy} was made with {section}.name = {name!r}, which is not here: known are "
        f"{', '.join(known)}. Use the release that made it, or install the package that has it: "
        "docs/extending.md."
    )
    assert catch_message(GMetaError, export_run, copy, tmp_path / "model") == told
    ended = run_gmeta("evaluate", copy)
    assert (ended.returncode, ended.stderr) == (1, f"error: {told}\n")


@pytest.mark.distributed
def test_a_vocabulary_altered_since_training_is_not_exported(raw_run: Path, tmp_path: Path) -> None:
    """It would name other rows of the trained table."""
    copy = Path(shutil.copytree(raw_run, tmp_path / "run"))
    data = Path(shutil.copytree(raw_run.parent / "data", tmp_path / "data"))
    config = json.loads((copy / "config.json").read_text())
    config["data"]["path"] = str(data)
    (copy / "config.json").write_text(json.dumps(config))
    file = data / "vocabulary" / "items.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert catch_message(FormatError, export_run, copy, tmp_path / "model") == (
        f"{file}: {len(whole)} bytes that differ from the checksum in the manifest, which lists "
        f"{len(whole)} bytes. Copy the dataset again or prepare it again; gmeta inspect --verify "
        "lists every damaged file"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run"]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["vocabulary/items.parquet", "layers.safetensors"])
def test_a_file_that_only_reading_shows_to_be_damaged_is_told_in_one_line(
    raw_run: Path, tmp_path: Path, name: str
) -> None:
    """Checksums would have told; who loads without them is told by the file's own format."""
    export_run(raw_run, tmp_path / "model")
    file = tmp_path / "model" / name
    file.write_bytes(bytes(file.stat().st_size))
    told = catch_message(GMetaError, gmeta.load, tmp_path / "model", verify=False)
    assert told.startswith(f"{file} cannot be read: ")  # then pyarrow's or safetensors' reason
    assert told.lower().endswith("export the run again")
    assert len(told.splitlines()) == 1
    assert ".." not in told.removeprefix(str(file))


@pytest.mark.distributed
def test_a_vocabulary_that_the_config_does_not_list_is_not_read(
    raw_run: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    export_run(raw_run, model)
    seal(model / "config.json", lambda body: body["files"].pop("vocabulary/items.parquet"))
    (model / "vocabulary/items.parquet").write_text("of a stranger")
    message = catch_message(GMetaError, gmeta.load, model)
    assert "it lists no file vocabulary/items.parquet" in message


@pytest.mark.distributed
def test_a_run_of_other_hardware_is_evaluated_on_what_is_here(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = json.loads((copy / "config.json").read_text())
    config["run"]["device"] = "cuda"
    config["outer"]["sparse_optimizer"] = "adam"
    config["sharding"]["default"] = "data_parallel"
    (copy / "config.json").write_text(json.dumps(config))
    result = evaluate(copy, "--split", SPLIT)
    assert result.returncode == 0, result.stderr
    assert json.loads((copy / "evaluation" / "evaluation.json").read_text())["runs"][0]["step"] == 8


@pytest.mark.distributed
def test_no_diverged_one_leaves(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(reader: CheckpointReader, names: list[str], *_: object) -> dict[str, torch.Tensor]:
        found = read(reader, names)
        return {name: value.fill_(torch.nan) for name, value in found.items()}

    read = CheckpointReader.read
    monkeypatch.setattr(CheckpointReader, "read", diverged)
    assert catch_message(GMetaError, export_run, run, tmp_path / "model") == (
        "layer model.bottom.0.weight holds values that are not finite: the run diverged. "
        "Export an earlier checkpoint with --step, or train with lower rates"
    )
    assert list(tmp_path.iterdir()) == []


class Masked(DLRM):
    """It has a mask, as attention of one's own often does."""

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: DlrmOptions) -> None:
        super().__init__(config, sizes, options)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


@pytest.mark.distributed
def test_a_mask_that_a_model_begins_with_is_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_mask(
        reader: CheckpointReader, names: list[str], *_: object
    ) -> dict[str, torch.Tensor]:
        given = [name for name in names if not name.endswith("mask")]
        mask = torch.tensor([0.0, -torch.inf])
        return {**dict.fromkeys(names, mask), **read(reader, given)}

    read = CheckpointReader.read
    monkeypatch.setattr(CheckpointReader, "read", with_mask)
    monkeypatch.setitem(MODELS, "dlrm", Masked)
    export_run(run, tmp_path / "model")
    layers = load_file(tmp_path / "model" / LAYERS_FILE)
    assert layers["model.mask"].tolist() == [0.0, -torch.inf]


@pytest.mark.distributed
def test_a_model_of_ones_own_that_reads_an_unpooled_list_is_exported(
    raw_run: Path, raw_rows: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for the longest list among values, and makes a layer at its first row."""
    (tmp_path / "mine_2.py").write_text(OWN_HISTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GMETA_PLUGINS", "mine_2")
    config = write_config(tmp_path / "train.toml", raw_run.parent / "data", tmp_path / "run")
    _trained(config, "model.name=mine_2:History")
    export_run(tmp_path / "run", tmp_path / "model")
    rows = raw_rows.filter(pa.compute.equal(raw_rows["user"], 1_000))
    task = gmeta.load(tmp_path / "model").adapt(rows)
    assert np.isfinite(task.predict(rows)).all()


def test_what_could_not_be_loaded_is_not_exported(run: Path, tmp_path: Path) -> None:
    def refuse(folder: Path, verify: bool) -> None:
        raise GMetaError(f"{folder} cannot be built (no). Load it with the release that wrote it")

    out = tmp_path / "model"
    message = catch_message(GMetaError, partial(export_run, load=refuse), run, out)
    assert message == (
        f"run {run} is not exported, as it could not be loaded: {out} cannot be built (no). Load "
        "it with the release that wrote it"
    )
    assert not list(tmp_path.iterdir())


def test_a_layer_of_another_shape_than_it_begins_with_is_looked_at_alone() -> None:
    check_layers({"seen": torch.ones(3)}, {"seen": torch.zeros(2)}, "")  # one's own may grow
    with pytest.raises(NotFiniteError, match="layer seen holds values that are not finite"):
        check_layers(
            {"seen": torch.full((3,), torch.inf)}, {"seen": torch.full((1,), torch.inf)}, ""
        )
