"""Rows that share a vector until steps have asked for them often enough: a run that stops goes on,
rows that a stream reuses are counted anew, and what does not go together is refused. That ranks
train what a plain loop does is tested in test_equals_reference.py, tables in a file in
test_beyond_memory.py."""

from pathlib import Path

import pytest
import torch

from gmeta.config.sharding import ShardingConfig, check_admission
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.errors import ConfigError, UserError
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.serving.export import CheckpointReader
from gmeta.training import train
from tests.distributed.harness import on_ranks
from tests.distributed.test_continuing import RESET, config_of, newest, train_each
from tests.support.increments import write_increments
from tests.support.refusals import catch_message

ADMISSION = {"model__admission": [2, 4], "data__tasks_per_step": 8}  # six steps


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Tables with all of their state, and what rare rows share."""
    names = ["model.learner.projections.shared_BD"]
    for table in summarise_checkpoint(checkpoint).tables:
        weight = f"tables.embeddings.{table.name}.weight"
        state = (
            f"{weight}.{table.name}.{key}" for key in ("momentum1", "steps_asked", "last_step")
        )
        names += [f"model.{weight}", *(f"optimizer.state.{name}" for name in state)]
    return CheckpointReader(checkpoint).read(names)


def refuse(ranks: Ranks, config: TrainConfig) -> str:
    return catch_message(UserError, train, config, ranks)


@pytest.mark.distributed
def test_a_stopped_run_goes_on_and_reused_rows_are_counted_anew(tmp_path: Path) -> None:
    first, second = write_increments(tmp_path / "shop", reset_rows=RESET)[:2]
    one, whole, stopped, on_2 = (tmp_path / name for name in ("one", "whole", "stopped", "on-2"))
    configs = [
        config_of(one, first, **ADMISSION), config_of(whole, second, one, **ADMISSION),
        config_of(stopped, second, one, run__max_steps=2, **ADMISSION),
        config_of(stopped, second, one, **ADMISSION),
    ]  # fmt: skip
    on_ranks(1, train_each, configs)
    on_ranks(2, train_each, [config_of(on_2, second, one, **ADMISSION)])
    unbroken = state_of(newest(whole))
    for name, values in state_of(newest(stopped)).items():
        assert torch.equal(values, unbroken[name]), name
    for name, values in state_of(newest(on_2)).items():
        torch.testing.assert_close(values, unbroken[name], rtol=0, atol=1e-6, msg=name)
    before = state_of(newest(one))
    for state in (before, unbroken):
        weight = state["model.tables.embeddings.item.weight"]
        asked = state["optimizer.state.tables.embeddings.item.weight.item.steps_asked"]
        assert torch.equal(weight.any(dim=1)[1:], asked[1:] >= 2)
        assert not weight[0].any()  # of unknown values
        assert 0 < weight.any(dim=1).sum() < len(weight)
    # A model that reads zeros as zeros would be another.
    unaware = config_of(tmp_path / "unaware", first, run__start_from=str(one))
    (message,) = on_ranks(1, refuse, unaware)
    assert message == (
        f"checkpoint {newest(one)} is of a run with model.admission, whose rare rows are zeros in "
        "place of a vector that they share, and this config has none. Set model.admission as it "
        "was in that run"
    )
    # Counts go on over increments, and Adagrad's discount is not theirs.
    name = "optimizer.state.tables.embeddings.item.weight.item.steps_asked"
    assert (unbroken[name][: len(before[name])] > before[name]).any()


@pytest.mark.parametrize(
    ("admission", "keys", "algorithm", "message"),
    [
        ((3,), {}, "maml", "model.admission = [3] is no rule: two numbers are allowed: after how "
         "many steps a row has an embedding of its own, and, if any, after how many without it "
         "loses it. Correct it, or remove the key"),
        ((0, 9), {}, "maml", "model.admission = [0, 9] is no rule: two numbers are allowed: after "
         "how many steps a row has an embedding of its own, and, if any, after how many without it "
         "loses it. Correct it, or remove the key"),
        ((2, 0), {"exchange": "torchrec"}, "maml", "model.admission = [2, 0], which TorchRec's "
         'exchange cannot count. Set sharding.exchange = "host", or model.admission = [0, 0]'),
        ((2, 0), {"groups": 2}, "maml", "model.admission = [2, 0], and with sharding.groups = 2 "
         "each group would count its own steps. Set sharding.groups = 1, or model.admission = "
         "[0, 0]"),
        ((2, 0), {"tables": ("item=column_wise",)}, "maml", "model.admission = [2, 0] counts whole "
         "rows, and table 'item' is column_wise: parts of a row on several ranks. Set another kind "
         "of sharding, or model.admission = [0, 0]"),
        ((2, 0), {"default": "planner"}, "maml", "model.admission = [2, 0] counts whole rows, and "
         "the planner may cut columns: parts of a row on several ranks. Set another kind of "
         "sharding, or model.admission = [0, 0]"),
        ((2, 0), {}, "metaemb", 'model.admission = [2, 0], and algorithm.name = "metaemb" makes '
         "the embeddings of ids that are rare. Choose another algorithm, or model.admission = "
         "[0, 0]"),
    ],
)  # fmt: skip
def test_what_cannot_wait_is_refused(
    admission: tuple[int, ...], keys: dict[str, str], algorithm: str, message: str
) -> None:
    config = ShardingConfig(**keys)
    arguments = admission, config, algorithm, ["item"]
    assert catch_message(ConfigError, check_admission, *arguments) == message


def test_no_rule_refuses_nothing() -> None:
    check_admission((0, 0), ShardingConfig(exchange="torchrec", groups=2), "metaemb", ["item"])
