"""What is refused before a rank starts, because config and dataset contradict each other."""

from pathlib import Path
from typing import Any

import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import ConfigError
from gmeta.runs.build import build
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.refusals import catch_message


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Labels 0, 1 and 3 of three users, five items."""
    rows = "".join(f"{i % 3},{i % 5},{(0, 1, 3)[i % 3]}\n" for i in range(12))
    (tmp_path / "raw.csv").write_text(f"user,item,y\n{rows}")
    schema = {
        "task": {"column": "user"}, "label": {"column": "y"},
        "single": [{"column": "item", "hash": 9}], "episodes": {"by": "random", "query_rows": 1},
    }  # fmt: skip
    prepare([str(tmp_path / "raw.csv")], str(tmp_path / "data"), parse_schema(schema))
    return tmp_path / "data"


def informed(data: Path, loss: str = "mse", **keys: Any) -> TrainConfig:
    return config_from_dict(
        {
            "data": {"path": str(data), "valid_split": ""}, "model": {"name": "melu"},
            "outer": {"loss": loss}, "support_features": keys,
        }
    )  # fmt: skip


def test_statistics_of_support_rows_count_labels_from_the_training_split(data: Path) -> None:
    _, learner = build(informed(data, task=True, columns=["item"]))
    assert learner.statistics.prior == pytest.approx((4 / 3, (14 / 9) ** 0.5))
    assert learner.model.decision[0].in_features == 16 + 5
    _, learner = build(informed(data, task=True, label_prior=[1, 2]))
    assert learner.statistics.prior == (1.0, 2.0)
    # What the loss does not take has no part in it; it is refused before training.
    _, learner = build(informed(data, "bce", task=True))
    assert learner.statistics.prior == (0.5, 0.5)
    _, learner = build(informed(data))
    assert learner.statistics.width == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"columns": ["shop"]},
            "support_features.columns: 'shop' matches no sparse column; this dataset has item. "
            'Name some of them, "*" for all, or none at all: []',
        ),
        (
            {"task": True, "label_prior": [3.6]},
            "support_features.label_prior = [3.6] is no mean and standard deviation above 0. "
            "Write e.g. [3.6, 1.1], or [] to take them from the training split",
        ),
    ],
)
def test_unknown_statistics_are_refused(data: Path, keys: dict[str, Any], message: str) -> None:
    assert catch_message(ConfigError, build, informed(data, **keys)) == message


@pytest.mark.parametrize(
    ("is_past", "episodes"),
    [
        (True, {"by": "time", "at": 5}),
        (True, {"by": "last", "query_rows": 1}),
        (False, {"by": "random", "query_rows": 1}),
    ],
)
def test_rows_are_not_drawn_anew_where_the_support_is_the_past(
    tmp_path: Path, is_past: bool, episodes: dict[str, Any]
) -> None:
    rows = "".join(f"{i % 3},{i % 5},{i % 2},{i}\n" for i in range(12))
    (tmp_path / "raw.csv").write_text(f"user,item,y,at\n{rows}")
    schema = {
        "task": {"column": "user"}, "label": {"column": "y"}, "time": {"column": "at"},
        "single": [{"column": "item", "hash": 9}], "episodes": episodes,
    }  # fmt: skip
    prepare([str(tmp_path / "raw.csv")], str(tmp_path / "data"), parse_schema(schema))
    config = config_from_dict(
        {
            "data": {"path": str(tmp_path / "data"), "valid_split": ""},
            "augment": {"resplit_support": True},
            "model": {"options": {"interaction": "cat"}},
        }
    )
    if not is_past:
        build(config)
        return
    assert catch_message(ConfigError, build, config) == (
        f"augment.resplit_support is true, but the support rows of {tmp_path}/data are the past of "
        "its query rows, which drawing them anew would mix. Set it to false"
    )


def test_a_frozen_base_needs_a_run_to_begin_with(click_logs: Path) -> None:
    raw: dict[str, Any] = {
        "data": {"path": str(click_logs)},
        "algorithm": {"name": "encoder", "options": {"train_base": False}},
    }
    assert catch_message(ConfigError, build, config_from_dict(raw)) == (
        "algorithm.options.train_base = false and run.start_from is empty: model and tables would "
        "stay as they are drawn. Name the run to begin with in run.start_from, or set it to true"
    )
    build(config_from_dict({**raw, "run": {"start_from": "runs/plain"}}))


@pytest.mark.parametrize(
    ("algorithm", "epochs", "message"),
    [
        (
            {"name": "maml", "plain_epochs": 4},
            4,
            "algorithm.plain_epochs = 4 of run.epochs = 4: none is left for maml. Choose fewer, or "
            "set algorithm.name = 'none'",
        ),
        (
            {"name": "encoder", "plain_epochs": 1, "options": {"train_base": False}},
            4,
            "algorithm.plain_epochs = 1 with algorithm.options.train_base = false: plain training "
            "teaches model and tables, which are to stay. Set one of them back",
        ),
        ({"name": "none", "plain_epochs": 4}, 4, ""),
        ({"name": "maml", "plain_epochs": 3}, 4, ""),
    ],
)
def test_plain_epochs_leave_the_algorithm_some(
    click_logs: Path, algorithm: dict[str, Any], epochs: int, message: str
) -> None:
    raw: dict[str, Any] = {
        "data": {"path": str(click_logs)},
        "algorithm": algorithm,
        "run": {"epochs": epochs, "start_from": "runs/plain"},
    }
    if not message:
        build(config_from_dict(raw))
        return
    assert catch_message(ConfigError, build, config_from_dict(raw)) == message


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        (
            "outer",
            {"loss": "mse", "sparse_weight_decay": 0.5},
            "outer.sparse_weight_decay = 0.5 is of rows that learn in our own tables: it needs "
            'sharding.exchange = "host", and no algorithm.options.train_base = false. Set them '
            "so, or leave it 0",
        ),
        (
            "model",
            {"name": "melu", "without": ["shop"]},
            "model.without names 'shop', which is no table: the dataset has item. Name some of "
            "them",
        ),
        (
            "model",
            {"name": "melu", "output_bias": 1.5},
            "model.output_bias = 1.5 with labels.standardise: outputs are deviations from the mean "
            "label already. Leave one of them out",
        ),
        (
            "algorithm",
            {"adapt_embeddings": ["item"]},
            "algorithm.adapt_embeddings names 'item', which model.without leaves out of the model. "
            "Take it out of one of them",
        ),
        (
            "labels",
            {"standardise": True, "moments": [3.6, 0.0]},
            "labels.moments = [3.6, 0.0] is no mean and deviation above 0 of each label. Write "
            "e.g. [3.6, 1.1], or [] to take them from the training split",
        ),
    ],
)
def test_regularisation_and_units_that_contradict_others_are_refused(
    data: Path, section: str, keys: dict[str, Any], message: str
) -> None:
    raw = informed(data).to_json()
    raw["sharding"]["exchange"] = "torchrec" if section == "outer" else "host"
    raw["model"]["without"] = ["item"] if section == "algorithm" else []
    raw["labels"]["standardise"] = True
    raw[section] = {**raw[section], **keys}
    assert catch_message(ConfigError, build, config_from_dict(raw)) == message


@pytest.mark.parametrize("sharding", [{"exchange": "torchrec"}, {"placement": "file"}])
def test_memory_checkpoints_need_tables_whose_changes_are_known(
    data: Path, sharding: dict[str, str]
) -> None:
    keys = {
        "data": {"path": str(data), "valid_split": ""}, "model": {"name": "melu"},
        "outer": {"loss": "mse"}, "sharding": sharding,
        "run": {"memory_checkpoint_every_steps": 5},
    }  # fmt: skip
    message = catch_message(ConfigError, build, config_from_dict(keys))
    assert message == (
        "run.memory_checkpoint_every_steps = 5 knows which rows of tables on the device change: it "
        'needs sharding.exchange = "host" and sharding.placement "auto" or "device", by no '
        "exception either. Set them so, or leave it 0"
    )
