"""An exported model loaded onto the pretended GPU beside the same one on the CPU."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import ItemFeaturesConfig, SupportFeaturesConfig
from gmeta.errors import UserError
from gmeta_models import ModelConfig
from tests.pretended.device import PretendedDevice, counting
from tests.support.exported import random_rows, write_random_model

ROWS = {"adapts rows": {"adapt_embeddings": True}, "some tables": {"adapt_embeddings": ("item",)}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("maml", "anil", "metasgd", "encoder", "encoder_maml")},
    "ridge": {"name": "ridge"},
    "metaemb": {
        "name": "metaemb",
        "adapt_embeddings": ("city",),
        "options": {"content": ("tags",)},
    },
    **{name: {"name": "maml", **more} for name, more in ROWS.items()},
    "metasgd of rows": {"name": "metasgd", "adapt_embeddings": True},
}
SAID = {
    "support_features": SupportFeaturesConfig(task=True, columns=("*",), label_prior=(0.5, 0.5)),
    "item_features": ItemFeaturesConfig(columns=("*",)),
}


Inside = Callable[[], AbstractContextManager[Any]]


def everything() -> tuple[dict[str, list[float]], list[str]]:
    """Return what `compared` and `refusals` do."""
    return compared(), refusals()


def compared(inside: Inside = PretendedDevice) -> dict[str, list[float]]:
    """The largest difference of each way to predict from the CPU's; `inside` is the device."""
    found = {}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"{model} {name}", {"name": model}, more)
        for model, names in (("dlrm", ALGORITHMS), ("cbml", ("maml",)), ("din", ("maml",)))
        for name in names
        for more in [{"algorithm": AlgorithmConfig(inner_lr=0.3, **ALGORITHMS[name])}]
    ]
    cases.append(("dlrm with statistics", {"name": "dlrm"}, SAID))
    for case, model, more in cases:
        with tempfile.TemporaryDirectory() as folder:
            options = {"bottom": (6,), "history": "seen"}
            sizes = {"embedding_dim": 4, "hidden": (8,), "options": options}
            write_random_model(Path(folder), model=ModelConfig(**{**sizes, **model}), **more)
            found[case] = differences(Path(folder), inside)
    return found


def differences(folder: Path, inside: Inside) -> list[float]:
    """Of a task, of one kept as bytes by the other device, of many tasks, of none."""
    here = gmeta.load(folder)
    rows, query = random_rows(6), random_rows(5, seed=1)
    many = random_rows(40, seed=2, num_tasks=7)
    task = here.adapt(rows)
    wanted = [task.predict(query), here.predict(query)]
    wanted += vars(here.predict_tasks(many, many)).values()
    with inside(), counting() as asked:
        there = gmeta.load(folder, device="cuda")
        adapted = there.adapt(rows)
        answers = [adapted.predict(query), there.predict(query)]
        answers += vars(there.predict_tasks(many, many)).values()
        answers.append(there.task(task.state()).predict(query))
    answers.append(here.task(adapted.state()).predict(query))
    wanted += [wanted[0], wanted[0]]
    assert all(answer.device.type == "cpu" for answer in answers)
    if inside is PretendedDevice:
        assert sum(asked.launches.values()) > 20  # it was there that it was computed
    pairs = zip(answers, wanted, strict=True)
    return [float((answer.double() - one.double()).abs().max()) for answer, one in pairs]


def refusals() -> list[str]:
    """What is said of devices that there are not."""
    told = []
    for name in ("cuda:1", "gpu", "cuda:x", "cpu:0"):
        try:
            gmeta.load("anywhere", device=name)
        except UserError as error:
            told.append(str(error))
    return told
