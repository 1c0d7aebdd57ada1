"""What an evaluation chose for a checkpoint, and who may trust it."""

from pathlib import Path

import pytest

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import GMetaError
from gmeta.runs.chosen_adaptation import read_chosen_adaptation, write_chosen_adaptation
from gmeta.runs.run_folder import RunFolder
from tests.support.refusals import catch_message

OWN = AlgorithmConfig("ridge", inner_lr=0.01, inner_steps=1, support_prior=3.0)


def test_what_was_chosen_is_of_one_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert read_chosen_adaptation(run, OWN, 8) is None
    write_chosen_adaptation(run, 8, 0.3, 5, metric="mae")
    expected = AlgorithmConfig("ridge", inner_lr=0.3, inner_steps=5, support_prior=3.0)
    assert read_chosen_adaptation(run, OWN, 8) == expected
    assert read_chosen_adaptation(run, OWN, 16) is None  # trained on since


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"step": 8, "inner_lr": 0.3, "inner_steps": 0}', "it holds no rate and steps above 0"),
        ('{"step": 8, "inner_lr": -1, "inner_steps": 1}', "it holds no rate and steps above 0"),
        ('{"step": 8, "inner_lr": 0.3, "inner_steps": true}', "it holds no rate and steps above 0"),
        ('{"step": 8, "inner_lr": 0.3}', "'inner_steps'"),
        ("[]", "it holds a list, not an object"),
    ],
)
def test_a_damaged_choice_is_told_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "adapting.json"
    path.write_text(text)
    assert catch_message(GMetaError, read_chosen_adaptation, RunFolder(tmp_path), OWN, 8) == (
        f"{path} is damaged: {why}. Evaluate the run again, or remove the file: the run then "
        "adapts as its config says"
    )
