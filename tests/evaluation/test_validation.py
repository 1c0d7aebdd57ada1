"""What is told of the scores of a split while a run trains."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from gmeta.config.train_config import config_from_dict
from gmeta.evaluation.validation import score_validation

BOTH = "of valid is undefined: 4 positive and 0 negative rows: both classes are needed"


@pytest.mark.parametrize(
    ("loss", "names"),
    [("bce", ["auc", "gauc", "logloss"]), ("pairwise", ["ndcg@10", "auc", "gauc"])],
)
def test_a_score_that_is_undefined_is_told_with_its_reason(loss: str, names: list[str]) -> None:
    keys: dict[str, Any] = {"data": {"path": "", "valid_split": "valid"}, "outer": {"loss": loss}}
    dataset = SimpleNamespace(features=SimpleNamespace(labels=()))
    scored: Any = SimpleNamespace(
        config=config_from_dict(keys), dataset=dataset, ranks=SimpleNamespace(rank=0)
    )
    table = pa.table({"label": [1.0] * 4, "after": [0.1, 0.2, 0.3, 0.4], "task": [1, 1, 2, 2]})
    told: list[str] = []
    with mock.patch("gmeta.evaluation.validation.predict_split", return_value=table):
        scores = score_validation(scored, told.extend)
    assert [*scores] == names
    assert scores["auc"] is None
    end = "" if loss == "bce" else ", of labels from 0.5 on (evaluation.positive_rating)"
    assert told[0] == f"auc {BOTH}{end}"
    assert [line.split()[0] for line in told] == [name for name in names if scores[name] is None]
