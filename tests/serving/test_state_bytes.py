"""Adapted tasks as bytes: the same predictions to the bit, and no harm from a stranger's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

import gmeta
from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import SupportFeaturesConfig
from gmeta.errors import UserError
from gmeta.serving.served_model import ServedModel
from gmeta.serving.state_bytes import _CHECKSUM_BYTES, _HEADER, _checksum
from gmeta_models import MODELS, ModelConfig
from tests.support.exported import metaemb_rate, random_rows, write_random_model

STATISTICS = SupportFeaturesConfig(task=True, columns=("city", "tags"), label_prior=(0.5, 0.5))
MAML = AlgorithmConfig(inner_steps=2, inner_lr=0.3)
HEADER_BYTES = _HEADER.size


def served(
    folder: Path, algorithm: AlgorithmConfig, model: str = "dlrm",
    statistics: SupportFeaturesConfig | None = None,
) -> ServedModel:  # fmt: skip
    config = ModelConfig(
        model, 4, hidden=(8,), options={"bottom": (8,), "history": "seen", "attention": (4,)}
    )
    write_random_model(folder, algorithm=algorithm, model=config, support_features=statistics)
    return gmeta.load(folder)


def algorithm_of(name: str, model: str = "dlrm") -> AlgorithmConfig:
    config = replace(MAML, name=name)
    if name == "metaemb":
        rate = metaemb_rate(model)
        config = replace(
            config,
            inner_lr=rate,
            adapt_embeddings=("city",),
            options={**config.options, "content": ("tags",)},
        )
    return config


def assert_the_same_to_the_bit(model: ServedModel, other: ServedModel) -> None:
    """What a task predicts, and what its bytes predict in another process's model."""
    query, moved = random_rows(9, seed=2), 0.0
    for num_rows in (1, 6):
        task = model.adapt(random_rows(num_rows, seed=1))
        content = task.state()
        expected = task.predict(query)
        again = other.task(content)
        assert torch.equal(again.predict(query), expected)
        assert again.state() == content
        moved = max(moved, float((expected - model.predict(query)).abs().max()))
    assert moved > 1e-5


@pytest.mark.parametrize("algorithm", [*sorted(ALGORITHMS), "none"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_algorithms_tasks_are_kept_to_the_bit(tmp_path: Path, model: str, algorithm: str) -> None:
    found = served(tmp_path, algorithm_of(algorithm, model), model)
    assert_the_same_to_the_bit(found, gmeta.load(tmp_path))


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("path", ["low_rank", "materialised"])
def test_rows_changes_and_support_are_kept(tmp_path: Path, path: str, embeddings: bool) -> None:
    config = replace(MAML, adapt_embeddings=embeddings, bias_rate=0.5, layer_paths=(f"*={path}",))
    found = served(tmp_path, config, statistics=STATISTICS)
    assert_the_same_to_the_bit(found, gmeta.load(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """One whose states have all parts: low rank, rows, support rows."""
    folder = tmp_path_factory.mktemp("states") / "model"
    config = replace(MAML, name="encoder_maml", adapt_embeddings=True)
    return served(folder, config, statistics=STATISTICS)


@pytest.fixture(scope="module")
def state(model: ServedModel) -> bytes:
    return model.adapt(random_rows(6, seed=1)).state()


def refused(model: ServedModel, content: object) -> str:
    with pytest.raises(UserError) as caught:
        model.task(content)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def signed(content: bytes) -> bytes:
    """The same with a checksum that holds: what a stranger can make."""
    before, payload = content[: HEADER_BYTES - _CHECKSUM_BYTES], content[HEADER_BYTES:]
    return before + _checksum(before, payload) + payload


def test_what_is_no_state_of_it_is_told(model: ServedModel, state: bytes, tmp_path: Path) -> None:
    remedy = "Adapt the task anew by its support rows"
    assert refused(model, "text") == (
        "a task's state is of type str; bytes are needed. Give what task.state() returned"
    )
    assert refused(model, b"\x80\x04pickle") == (
        "a task's state begins with b'\\x80\\x04pickle' and has 8 bytes: it is none. "
        "Give what task.state() returned"
    )
    newer = signed(state[:7] + b"\x03" + state[8:])
    assert refused(model, newer) == (
        "a task's state has format version 3; this release reads versions 1 and 2. "
        f"{remedy}, or read it with the release that wrote it"
    )
    other = served(tmp_path, replace(MAML, name="encoder_maml", adapt_embeddings=True))
    assert other.checksum != model.checksum
    assert refused(other, state) == (
        f"a task's state is of the exported model {model.checksum}; this one is {other.checksum}, "
        f"and it carries no support rows. {remedy}, or load the model that it was adapted with"
    )


def test_every_damage_is_told_in_a_line(model: ServedModel, state: bytes) -> None:
    rng = np.random.default_rng(0)
    for cut in [*range(40), *rng.integers(40, len(state), 100)]:
        refused(model, state[: int(cut)])
    for _ in range(300):
        place = int(rng.integers(len(state)))
        flipped = bytearray(state)
        flipped[place] ^= 1 << int(rng.integers(8))
        refused(model, bytes(flipped))
    refused(model, state + b"\0")


def test_what_a_stranger_signs_is_refused_or_predicts(model: ServedModel, state: bytes) -> None:
    rng, query = np.random.default_rng(1), random_rows(4, seed=2)
    header_end = HEADER_BYTES + 8 + int.from_bytes(state[HEADER_BYTES : HEADER_BYTES + 8], "little")
    told: list[str] = []
    for turn in range(400):
        wrong = bytearray(state)
        # Most of them in the lengths and in the JSON, where names, types and shapes stand.
        last = len(state) if turn % 4 == 0 else header_end
        place = int(rng.integers(HEADER_BYTES, last))
        wrong[place] = int(rng.integers(256))
        if turn % 5 == 0:
            wrong[HEADER_BYTES : HEADER_BYTES + 8] = rng.bytes(8)  # a length of any size
        try:
            model.task(signed(bytes(wrong))).predict(query)
        except UserError as error:
            told.append(str(error))
    assert len(told) > 200
    assert {len(line.splitlines()) for line in told} == {1}


def without(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays.__delitem__(name)


def as_if(name: str, array: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays.__setitem__(name, array)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("keys"), "'keys'"),
        (as_if("other", np.zeros(1)), "'other' is no part of a state"),
        (as_if("keys", np.array([0, 10**12])), "its keys are no ascending rows of the tables"),
        (as_if("keys", np.array([3, 3])), "its keys are no ascending rows of the tables"),
        (as_if("keys", np.zeros(2, np.float32)), "keys is float32 [2]"),
        (as_if("change/top.9/weight_TIO", np.zeros(1)), "layer 'top.9' does not adapt"),
        (without("support/label_N"), "'label_N'"),
        (
            as_if("support/dense_NK", np.full((6, 1), np.nan, np.float32)),
            "dense_NK holds a value that is not finite",
        ),
        (as_if("support/ids_NF", np.full((6, 2), 60)), "an id that its table does not have"),
        (as_if("support/lengths_NM", np.full((6, 2), -1, np.int32)), "a length below 0"),
    ],
)
def test_parts_that_do_not_fit_the_model_are_refused(
    model: ServedModel, state: bytes, change: Callable[[dict[str, np.ndarray]], None], told: str
) -> None:
    arrays = dict(load(state[HEADER_BYTES:]))
    change(arrays)
    line = refused(model, signed(state[:HEADER_BYTES] + save(arrays)))
    assert line.startswith("a task's state holds what this model cannot take (")
    assert told in line
    assert line.endswith("). Adapt the task anew by its support rows")


def test_a_state_of_few_rows_is_a_few_kilobytes(tmp_path: Path) -> None:
    found = served(tmp_path, replace(MAML, inner_steps=1, layer_paths=("*=low_rank",)))
    small, large = (len(found.adapt(random_rows(n, seed=1)).state()) for n in (1, 20))
    assert small < 2_500 < large
