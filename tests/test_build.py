"""What is refused before a rank starts, because config and dataset contradict each other."""

from pathlib import Path
from typing import Any

import pytest

from gmeta.build import build
from gmeta.config import config_from_dict
from gmeta.errors import ConfigError
from metaio.prepare.local import prepare
from metaio.prepare.schema import parse_schema


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
        "task": {"column": "user"},
        "label": {"column": "y"},
        "time": {"column": "at"},
        "single": [{"column": "item", "hash": 9}],
        "episodes": episodes,
    }
    prepare([str(tmp_path / "raw.csv")], str(tmp_path / "data"), parse_schema(schema))
    config = config_from_dict(
        {
            "data": {"path": str(tmp_path / "data"), "valid_split": ""},
            "augment": {"resplit_support": True},
            "model": {"interaction": "cat"},
        }
    )
    if not is_past:
        build(config)
        return
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert str(caught.value) == (
        f"augment.resplit_support is true, but the support rows of {tmp_path}/data are the past of "
        "its query rows, which drawing them anew would mix. Set it to false"
    )


def test_a_frozen_base_needs_a_run_to_begin_with(click_logs: Path) -> None:
    raw: dict[str, Any] = {
        "data": {"path": str(click_logs)},
        "algorithm": {"name": "encoder", "train_base": False},
    }
    with pytest.raises(ConfigError) as caught:
        build(config_from_dict(raw))
    assert str(caught.value) == (
        "algorithm.train_base = false and run.start_from is empty: model and tables would stay as "
        "they are drawn. Name the run to begin with in run.start_from, or set it to true"
    )
    build(config_from_dict({**raw, "run": {"start_from": "runs/plain"}}))
