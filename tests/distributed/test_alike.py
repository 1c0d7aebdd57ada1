"""Ranks that were started by hand with different commands train nothing, and each says why."""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gmeta.distributed.ranks import Ranks
from gmeta.errors import UserError
from gmeta.runs.rank_agreement import check_alike
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.distributed.harness import on_ranks
from tests.support.commands import SMALL_MODEL, environment, write_config
from tests.support.forked import Task, forked
from tests.support.waiting import PATIENCE_S


def refused(ranks: Ranks, told: list[dict[str, Any]]) -> str:
    try:
        check_alike(told[ranks.rank], ranks)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_every_rank_names_what_the_first_other_rank_was_told() -> None:
    seven = {"run.seed": 7, "outer.loss": "bce"}
    eight = {"run.seed": 8, "outer.loss": "mse"}
    assert on_ranks(4, refused, [seven] * 4) == [""] * 4
    line = (
        "rank 2 has run.seed = 8 (rank 0: 7), outer.loss = 'mse' (rank 0: 'bce'): all ranks of a "
        "run need the same. Start every rank with the same command, config and data"
    )
    assert on_ranks(4, refused, [seven, seven, eight, eight]) == [line] * 4


def by_hand(folder: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """The exit code and stderr of each command, as one rank of a job that nobody looks after."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        ranks = []
        for rank, command in enumerate(commands):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(commands)}
            met = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            env = {**environment(), **{name: str(one) for name, one in {**own, **met}.items()}}
            place = folder / f"rank-{rank}"
            place.mkdir(parents=True)
            ranks.append(stack.enter_context(forked(Task("gmeta", tuple(command), env, place))))
        return [(rank.wait(2 * PATIENCE_S), rank.stderr) for rank in ranks]


# Each ended with 0 and a wrong model, in a traceback, or never.
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("run.seed", ("0", "1")), ("data.source", ("static", "service")),
        ("model.embedding_dim", ("4", "8")), ("run.dir", ("here", "there")),
    ],
)  # fmt: skip
def test_ranks_with_other_configs_end_before_anything_is_made(
    tmp_path: Path, click_logs: Path, key: str, values: tuple[str, str]
) -> None:
    config = write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")
    command = ["train", str(config), *SMALL_MODEL]
    written = tmp_path / "written"
    given = [str(written / one) if key == "run.dir" else one for one in values]
    ended = by_hand(tmp_path / "ranks", *([*command, f"{key}={one}"] for one in given))
    assert [code for code, _ in ended] == [2, 2]
    told = [line for _, text in ended for line in text.splitlines() if "error" in line]
    assert len(told) == 1  # by rank 0 for both
    assert told[0].startswith(f"error on rank 0: rank 1 has {key} = ")
    assert not written.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_ranks_of_other_data_end_before_anything_is_made(tmp_path: Path, click_logs: Path) -> None:
    other = tmp_path / "other"
    prepare_synthetic(str(other), SyntheticConfig(num_tasks=20, num_items=60, query_rows=5))
    config = write_config(tmp_path / "train.toml", click_logs, tmp_path / "run")
    command = ["train", str(config), *SMALL_MODEL]
    ended = by_hand(tmp_path / "ranks", command, [*command, f"data.path={other}"])
    assert [code for code, _ in ended] == [2, 2]
    assert "error on rank 0: rank 1 has the fingerprint of data.path = " in ended[0][1]
    assert not (tmp_path / "run").exists()
