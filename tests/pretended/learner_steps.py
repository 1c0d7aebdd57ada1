"""The learner's step on the CPU and on the pretended GPU: losses, gradients, and what the GPU was
asked for.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.batches.accumulate import accumulated_loss, in_parts
from gmeta.build import build_learner
from gmeta.learner import MetaLearner
from gmeta.numerics import autocast
from gmeta_models import ModelConfig
from tests import reference
from tests.pretended.device import CUDA, HOST, Counts, OnDevice, PretendedDevice, counting, held

WIDTH = 8
HEADS = {"dlrm": "top.*"}  # others: decision.*
SIZES = [(6, 5), (2, 3), (9, 4), (1, 1), (4, 6)]  # support and query rows of each task


@dataclass(frozen=True)
class Case:
    """One way to take a step."""

    model: str
    algorithm: str
    general: bool = False
    everything: bool = False  # all layers and the embedding rows adapt, else the head alone
    mode: str = "train"  # or "parts", in two micro-batches; or "predict"
    precision: str = "float32"
    rates: str = "output"
    path: str = "auto"
    tables: tuple[str, ...] = ()  # those whose rows adapt, with `everything`

    @property
    def name(self) -> str:
        """Say what is not as usual."""
        usual = asdict(Case("", ""))
        told = [
            name if value is True else str(value)
            for name, value in asdict(self).items()
            if value != usual[name]
        ]
        return " ".join(told)


def all_cases() -> Iterator[Case]:
    """Every model with every algorithm in every loop, and what else changes a step."""
    models = ("melu", "dlrm", "cbml", "din")
    fast = ("maml", "fomaml", "metasgd")
    for model in models:
        for algorithm in ("none", "maml", "fomaml", "anil", "metasgd", "reptile", "encoder",
                          "encoder_maml", "metaemb"):  # fmt: skip
            if algorithm.startswith("encoder") and model == "cbml":
                continue  # it has gates of its own
            yield Case(model, algorithm)
        for algorithm, everything in product(fast, (False, True)):
            yield Case(model, algorithm, general=True, everything=everything)
            if everything:
                yield Case(model, algorithm, everything=True)
        yield Case(model, "reptile", everything=True)
        for general in (False, True):
            yield Case(model, "maml", general, mode="parts")
            yield Case(model, "maml", general, precision="bf16")
        yield Case(model, "maml", mode="predict")
        yield Case(model, "maml", everything=True, mode="predict")
        yield Case(model, "maml", everything=True, precision="bf16")
        yield Case(model, "maml", everything=True, tables=("s0",))
        yield Case(model, "metasgd", everything=True, tables=("s0",))
    for general, path in product((False, True), ("low_rank", "materialised")):
        yield Case("melu", "maml", general, path=path)
    for rates in ("layer", "weight"):
        yield Case("melu", "metasgd", rates=rates)


def learner_of(case: Case) -> MetaLearner:
    """The learner of a case, initialised the same each time."""
    history = case.model == "din"
    features = reference.some_features(3, 2, 2, history=history)
    adapting: Any = case.tables or case.everything
    if case.algorithm in ("anil", "encoder"):
        adapting = False
    elif case.algorithm == "metaemb":
        adapting = ("s0",)
    layers = "*" if case.everything or case.algorithm == "anil" else HEADS.get(
        case.model, "decision.*"
    )  # fmt: skip
    algorithm = AlgorithmConfig(
        name=case.algorithm,
        inner_steps=2,
        adapt_layers=(layers,),
        adapt_embeddings=adapting,
        learned_rates=case.rates,  # type: ignore[arg-type]
        inner_path=case.path,  # type: ignore[arg-type]
        content=("s1",) if case.algorithm == "metaemb" else (),
    )
    model = ModelConfig(
        name=case.model,
        embedding_dim=WIDTH,
        hidden=(16, 8),
        bottom=(8,),
        history="m0" if history else "",
    )
    torch.manual_seed(0)
    learner = build_learner(features, model, algorithm, "bce")
    if case.general:
        learner.use_general_loop()
    return learner


def step_of(case: Case, device: torch.device) -> tuple[str, list[Tensor], Counts, Counts]:
    """Take a step; return which loop took it, loss and gradients (predictions), and what the
    device was asked for by the batch on its way there, and by the step.
    """
    dtype = torch.float32 if case.precision == "bf16" else torch.float64
    learner = learner_of(case).to(dtype)
    rng = random.Random(7)
    features = reference.some_features(3, 2, 2, history=case.model == "din")
    tasks = [reference.random_task(features, *sizes, rng) for sizes in SIZES]
    batch = reference.batch_of(tasks, features).map(lambda one: _as(one, dtype))
    torch.manual_seed(1)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH, dtype=dtype) * 0.1
    if device == CUDA:
        with PretendedDevice():
            learner, rows_UD = learner.to(CUDA), OnDevice(rows_UD)
    rows_UD.requires_grad_()
    arrange = learner.arrange_to_predict if case.mode == "predict" else learner.arrange
    if case.mode == "parts":
        arrange = in_parts(learner.arrange, 2)  # type: ignore[assignment]
    arranged: Any = arrange(batch)
    kind = type(getattr(arranged, "parts", [arranged])[0].rows).__name__
    with PretendedDevice() if device == CUDA else torch.enable_grad():
        with counting() as moving:
            episodes = arranged.to(device)
        with counting() as stepping, autocast(case.precision, device):
            if case.mode == "predict":
                predicted = learner.predict(rows_UD, episodes)
                found = [predicted.before_N, predicted.after_N]
            else:
                take = accumulated_loss if case.mode == "parts" else MetaLearner.__call__
                loss = take(learner, rows_UD, episodes, 1.0)
        if case.mode != "predict":
            with counting() as behind:
                loss.backward()
            stepping.launches += behind.launches
            stepping.waits += behind.waits
            stepping.to_device += behind.to_device
            grads = [one.grad for one in learner.parameters() if one.grad is not None]
            found = [loss.detach(), rows_UD.grad, *grads]
    if device == CUDA:
        assert all(isinstance(one, OnDevice) for one in found), "a result is left on the host"
    return kind, [held(one).detach() for one in found], moving, stepping


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if values.is_floating_point() else values


def readings(numbers: list[int]) -> list[dict[str, Any]]:
    """Compare the steps of these cases: how far the GPU's values are from the CPU's, relative to
    their norm, and the counts.
    """
    cases, found = list(all_cases()), []
    for number in numbers:
        case = cases[number]
        try:
            _, expected, _, _ = step_of(case, HOST)
            kind, values, moving, stepping = step_of(case, CUDA)
            pairs = list(zip(expected, values, strict=True))
            far = [float((a - b).norm() / (a.norm() + 1e-30)) for a, b in pairs]
        except Exception as error:  # noqa: BLE001 - each case has its own test
            found.append({"case": case.name, "error": f"{type(error).__name__}: {error}"})
            continue
        found.append(
            {
                "case": case.name,
                "error": "",
                "rows": kind,
                "far": max(far),
                "waits": moving.waits + stepping.waits,
                "to_device": moving.to_device,
                "pageable": moving.pageable,
                "copies_inside": stepping.to_device + stepping.to_host,
                "launches": stepping.num_launches,
            }
        )
    return found
