"""The learner's step on the CPU and the pretended GPU: losses, gradients, what was asked for."""

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from math import nan
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.labels import LabelsConfig
from gmeta.data import transfer
from gmeta.data.accumulate import accumulate_loss
from gmeta.data.collate import collate_in_parts
from gmeta.data.cuda_graphs import CudaCapture
from gmeta.learner import MetaLearner
from gmeta.platform.numerics import autocast
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.format.features import Features, name_event_column
from metaio.read.batch import TaskBatch
from tests.pretended import serving
from tests.pretended.device import CUDA, HOST, Counts, PretendedDevice, counting, held
from tests.pretended.mutants import MUTANTS
from tests.support import reference

WIDTH = 8
HEADS = {  # others: decision.*
    "dlrm": "top.*",
    "deepfm": "deep.*",
    "dcnv2": "deep.*",
    "mmoe": "towers.*",
    "ple": "towers.*",
}
LABELS = ("click", "buy", "stars")
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
    buckets: bool = False  # arranged in few shapes
    graph: bool = False  # the third of three equal steps, replayed
    loss: str = "bce"
    labels: bool = False  # three, of which not every row has the third
    weights: bool = False  # each row has a weight of its own
    events: str = ""  # the encoder of each task's earlier rows

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
                          "encoder_maml", "metaemb", "ridge"):  # fmt: skip
            if algorithm.startswith("encoder") and model == "cbml":
                continue  # it has gates of its own
            yield Case(model, algorithm)
        yield Case(model, "maml", general=True)
        for algorithm, general in product(fast, (False, True)):
            yield Case(model, algorithm, general, everything=True)
        yield Case(model, "reptile", everything=True)
        for general in (False, True):
            yield Case(model, "maml", general, mode="parts")
            yield Case(model, "maml", general, precision="bf16")
        for algorithm, everything in product(("maml", "fomaml"), (False, True)):
            yield Case(model, algorithm, everything=everything, buckets=True)
        yield Case(model, "maml", mode="parts", buckets=True)
        yield Case(model, "maml", buckets=True, graph=True)
        if model != "din":  # its history adapts in the general loop
            yield Case(model, "fomaml", everything=True, buckets=True, graph=True)
        yield Case(model, "maml", precision="bf16", buckets=True)
        yield Case(model, "maml", mode="predict")
        yield Case(model, "maml", everything=True, mode="predict")
        yield Case(model, "maml", everything=True, precision="bf16")
        yield Case(model, "maml", everything=True, tables=("s0",))
        yield Case(model, "metasgd", everything=True, tables=("s0",))
    for model, labels in product(("deepfm", "dcnv2", "mmoe", "ple"), (False, True)):
        yield Case(model, "maml", labels=labels)
        yield Case(model, "maml", everything=True, labels=labels)
        yield Case(model, "maml", mode="parts", labels=labels)
        if labels and model in ("deepfm", "ple"):
            continue  # as dcnv2, of one output layer, and as mmoe, of a tower a label
        for algorithm in ("none", "fomaml", "metasgd", "anil", "reptile"):
            yield Case(model, algorithm, labels=labels)
        for everything in (False, True):
            yield Case(model, "maml", general=True, everything=everything, labels=labels)
        yield Case(model, "maml", mode="predict", labels=labels)
        yield Case(model, "maml", precision="bf16", labels=labels)
        if model == "dcnv2":  # the others adapt in the general loop
            yield Case(model, "maml", buckets=True, graph=True, labels=labels)
    for general, buckets in ((False, False), (False, True), (True, False)):
        for loss in ("mse", "huber", "mae", "softmax", "pairwise"):
            yield Case("melu", "maml", general, buckets=buckets, loss=loss)
        for model, labels in (("melu", False), ("dlrm", True)):
            yield Case(model, "maml", general, buckets=buckets, labels=labels, weights=True)
        yield Case("dlrm", "fomaml", general, buckets=buckets, labels=True)
    for general, path in product((False, True), ("low_rank", "materialised")):
        yield Case("melu", "maml", general, path=path)
    for rates in ("layer", "weight"):
        yield Case("melu", "metasgd", rates=rates)
    for events in ("sasrec", "hstu", "sim", "din"):
        for algorithm, general in (("none", False), ("maml", False), ("fomaml", True)):
            yield Case("melu", algorithm, general, events=events)
        yield Case("melu", "maml", mode="parts", events=events)
        yield Case("melu", "maml", buckets=True, events=events)
        yield Case("melu", "maml", buckets=True, graph=True, events=events)
        yield Case("melu", "maml", mode="predict", events=events)


def learner_of(case: Case) -> MetaLearner:
    """The learner of a case, initialised the same each time."""
    history = case.model == "din"
    features = features_of(case)
    adapting: Any = case.tables or case.everything
    if case.algorithm in ("anil", "encoder"):
        adapting = False
    elif case.algorithm == "metaemb":
        adapting = ("s1",)  # another than DIN's history has
    layers = "*" if case.everything or case.algorithm == "anil" else HEADS.get(
        case.model, "decision.*"
    )  # fmt: skip
    algorithm = AlgorithmConfig(
        name=case.algorithm,
        inner_steps=2,
        adapt_layers=(layers,),
        adapt_embeddings=adapting,
        options={
            "learned_rates": case.rates,
            "content": ("s2",) if case.algorithm == "metaemb" else (),
        },
        layer_paths=("*=" + (case.path),),
    )
    model = ModelConfig(
        name=case.model,
        embedding_dim=WIDTH,
        hidden=(16, 8),
        options={
            "bottom": (8,), "history": "m0" if history else "", "expert": (8,), "experts": 2,
            "own_experts": 1,
        },
        events=case.events or "none",
    )  # fmt: skip
    torch.manual_seed(0)
    of_labels = LabelsConfig(
        loss={"stars": "mse"}, weight={"buy": 2.0}, entire_space={"buy": "click"}
    )
    labels = {"labels": of_labels} if case.labels else {}
    learner = build_learner(features, model, algorithm, case.loss, **labels)
    if case.general:
        learner.use_general_loop()
    learner.in_buckets = case.buckets
    if case.graph:
        assert learner.use_graphs(CudaCapture()) == ""
    return learner


def step_of(
    case: Case,
    device: torch.device,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[list[Tensor], Counts, Counts]:
    """Take a step; return loss and gradients (or predictions), and what the device was asked for by
    the batch on its way there, and by the step. `inside` is the pretended device, or none; `around`
    what watches the step alone, the last of equal ones."""
    dtype = torch.float32 if case.precision == "bf16" else torch.float64
    batch = batch_of(case, dtype)
    torch.manual_seed(1)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH, dtype=dtype) * 0.1
    with inside():
        learner = learner_of(case).to(device, dtype)
        rows_UD = rows_UD.to(device).requires_grad_()
    arrange: Callable[[TaskBatch], Any] = learner.collate
    if case.mode == "predict":
        arrange = learner.collate_to_predict
    elif case.mode == "parts":
        arrange = collate_in_parts(learner.collate, 2)
    arranged = arrange(batch)
    with inside():
        with counting(Counts(with_work=False)) as moving:
            episodes = arranged.to(device)
        # Weights of labels are put there once.
        for _ in range(3 if case.graph else 2 if case.labels else 1):
            rows_UD.grad = None
            learner.zero_grad()
            with around(), counting(Counts(with_work=False)) as stepping:
                found = _step(learner, rows_UD, episodes, case)
    assert all(one.device == device for one in found), "a result is on another device"
    return [held(one).detach() for one in found], moving, stepping


def _step(learner: MetaLearner, rows_UD: Tensor, episodes: Any, case: Case) -> list[Tensor]:
    """Return loss and gradients, or predictions."""
    with autocast(case.precision, rows_UD.device):
        if case.mode == "predict":
            predicted = learner.predict(rows_UD, episodes)
            return [predicted.before_N, predicted.after_N]
        take = accumulate_loss if case.mode == "parts" else MetaLearner.__call__
        loss = take(learner, rows_UD, episodes, 1.0)
    loss.backward()
    grads = [one.grad for one in (rows_UD, *learner.parameters()) if one.grad is not None]
    return [loss.detach(), *grads]


def features_of(case: Case) -> Features:
    """The columns of a case."""
    features = reference.some_features(3, 2, 2, history=case.model == "din")
    features = replace(features, labels=LABELS if case.labels else (), weight="w" * case.weights)
    if not case.events:
        return features
    own = (replace(one, name=name_event_column(one.name)) for one in features.single[:2])
    return replace(features, events=tuple(own))


def batch_of(case: Case, dtype: torch.dtype) -> TaskBatch:
    """The batch of a case, the same each time."""
    batch = batch_of_sizes(case, SIZES, random.Random(7))
    as_asked = lambda one: one.to(dtype) if one.is_floating_point() else one  # noqa: E731
    return batch.map(as_asked)


def batch_of_sizes(case: Case, sizes: Sequence[tuple[int, int]], rng: random.Random) -> TaskBatch:
    """Random tasks of so many support and query rows, with the labels and weights of a case."""
    features = features_of(case)
    tasks = [reference.random_task(features, *size, rng) for size in sizes]
    batch = reference.batch_of(tasks, features)
    num_rows = batch.num_rows
    if case.labels:
        stars_N = torch.arange(num_rows) % 5 + torch.where(torch.arange(num_rows) % 3 > 0, 0, nan)
        bought_N = batch.label_N * (torch.arange(num_rows) % 2)
        batch.label_N = torch.stack([batch.label_N, bought_N, stars_N], dim=1)
    if case.weights:
        batch.weight_N = 0.5 + torch.arange(num_rows) % 3
    if case.events:
        # Each row is an event, too, which those behind it know.
        batch.num_events_T = batch.row_offsets_T1.diff()
        first_N = batch.row_offsets_T1[:-1].repeat_interleave(batch.num_events_T)
        batch.events_before_N = (torch.arange(num_rows) - first_N).to(torch.int32)
        batch.event_positions = batch.positions_NF[:, :2].clone()
        batch.event_numbers = 40.0 * batch.events_before_N.unsqueeze(1)
    return batch


def distance(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return how far the farthest of these is, relative to its norm; of one that is nothing but
    rounding, as the last bias of a loss of the order, to a thousandth of the largest."""
    pairs = list(zip(expected, found, strict=True))
    least = 1e-3 * max(float(a.norm()) for a, _ in pairs) + 1e-30
    return max(float((a - b.to(HOST)).norm()) / max(float(a.norm()), least) for a, b in pairs)


def of_cpu(case: Case) -> Case:
    """Return the case that a case's values are those of, on the CPU."""
    return replace(case, buckets=False, graph=False)


@cache  # some cases are the same there
def values_on_cpu(case: Case) -> list[Tensor]:
    """Return loss and gradients, or predictions, of a step on the CPU."""
    return step_of(case, HOST)[0]


def readings(numbers: list[int]) -> list[dict[str, Any]]:
    """How far the GPU's values are from the CPU's, relative to their norm, and the counts."""
    cases, found = list(all_cases()), []
    for number in numbers:
        case = cases[number]
        try:
            expected = values_on_cpu(of_cpu(case))
            values, moving, stepping = step_of(case, CUDA, PretendedDevice)
            far = distance(expected, values)
        except Exception as error:  # noqa: BLE001 - each case has its own test
            found.append({"case": case.name, "error": f"{type(error).__name__}: {error}"})
            continue
        found.append(
            {
                "case": case.name, "error": "", "far": far,
                "waits": moving.waits + stepping.waits, "to_device": moving.to_device,
                "pageable": moving.pageable,
                "copies_inside": stepping.to_device + stepping.to_host,
                "launches": stepping.num_launches,
            }
        )  # fmt: skip
    return found


def everything(fake: list[int], mutants: list[str], mutated: int) -> dict[str, Any]:
    """Return the readings of all cases, what went wrong on tensors without values, the readings
    of one case under each mutant, those of the benchmark, and what serving shows: in one process,
    as its start takes longer than a hundred cases."""
    found = {"readings": readings(list(range(len(list(all_cases()))))), "fake": fake_steps(fake)}
    under = {}
    for name in mutants:
        with MUTANTS[name]():
            (under[name],) = readings([mutated])
    found |= {"mutants": under, "benchmark": import_module("gpu").counted()}
    return found | {"serving": serving.everything()}


def fake_steps(numbers: list[int]) -> dict[str, str]:
    """Take these steps on tensors without values: what went wrong, by case.

    An operation whose shape depends on values, or that reads one, raises."""
    found = {}
    for number in numbers:
        case = list(all_cases())[number]
        learner = learner_of(case)
        batch = batch_of(case, torch.float32)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            for module in learner.modules():
                for own in (module._parameters, module._buffers):
                    for name, one in own.items():
                        like = None if one is None else torch.empty_like(one, device=CUDA)
                        is_layer = isinstance(one, nn.Parameter) and like is not None
                        own[name] = nn.Parameter(like) if is_layer else like  # type: ignore[assignment]
            rows_UD = torch.empty(
                batch.unique_ids_U.numel(), WIDTH, device=CUDA, requires_grad=True
            )
        episodes = learner.collate(batch)
        try:
            with (
                fake,
                patch.object(
                    transfer,
                    "_in_one_copy",
                    lambda block, device: torch.empty_like(block, device=device),
                ),
            ):
                loss = learner(rows_UD, episodes.to(CUDA), 1.0)
                loss.backward()
                assert loss.device == CUDA
                assert rows_UD.grad is not None
            found[case.name] = ""
        except Exception as error:  # noqa: BLE001 - each case has its own test
            found[case.name] = "".join(traceback.format_exception(error))
    return found
