"""Somebody's own package (DCN-v2, two labels, a metric, callbacks) in a job's whole life."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

from tests.serving.server.test_labels import request_of
from tests.support.commands import environment, losses, metrics, without_pictures
from tests.support.forked import run_forked
from tests.support.labelled import SCHEMA, TRAIN, write_log

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = '''
import os
import signal

import numpy as np
import torch
from torch import nn

from gmeta.runs.logging.callback import Callback
from gmeta.metrics.custom_metrics import Metric


class DCNv2(nn.Module):
    """Wang et al., DCN V2, 2021: one cross layer, and a layer on it for each label."""

    def __init__(self, config, sizes):
        super().__init__()
        self.pooling = config.pooling
        width = (sizes.num_single + sizes.num_multi) * config.embedding_dim + sizes.num_dense
        self.cross = nn.Linear(width, width)
        self.output = nn.Linear(width, sizes.outputs)

    def forward(self, inputs):
        x0 = inputs.pooled(self.pooling).side_by_side_NX()
        return self.output(x0 * self.cross(x0) + x0)


class FourSteps(Callback):
    def on_step_end(self, run, loss):
        print("people print")
        if run.step == 4:
            run.stop("FourSteps: it is the fourth")


class KilledAtSeven(Callback):
    def on_step_end(self, run, loss):
        if run.step == 7 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def spread(label_N, prediction_N, task_N):
    return float(np.std(prediction_N))


SPREAD = Metric(spread, "spread", True, "Standard deviation of what is predicted.")
'''
# What pip leaves beside the package.
INSTALLED = {
    "METADATA": "Metadata-Version: 2.1\nName: shop-recommender\nVersion: 0.3.0\n",
    "entry_points.txt": "[gmeta.models]\nshop-dcn = shoprec.dcn:DCNv2\n"
    "[gmeta.metrics]\nspread = shoprec.dcn:SPREAD\n"
    "[gmeta.callbacks]\nfour-steps = shoprec.dcn:FourSteps\n",
    "RECORD": "shoprec/__init__.py,,\nshoprec/dcn.py,,\n",
}
# Another process, which knows the export alone.
LOAD = """
import sys, gmeta
model = gmeta.load(sys.argv[1])
rows = {"item": [1, 2], "shop": [3, 4], "price": [0.5, 0.1]}
task = model.adapt({**rows, "click": [1, 0], "bought": [1, 0]})
print(type(model.learner.model).__module__, tuple(task.predict(rows).shape))
"""
SERVE = """
import json, sys
from pathlib import Path
from tests.serving.server.serving import post, service_of
with service_of(Path(sys.argv[1])) as service:
    print(post(service, json.loads(Path(sys.argv[2]).read_text())).text)
"""


def ran(at: Path, program: str, *words: str | Path, code: int = 0) -> str:
    """The output of `python -m PROGRAM` in the folder `at`, whose packages are installed."""
    roots = [str(at), str(ROOT), str(ROOT / "models"), str(ROOT / "protos")]
    env = {**environment(), "PYTHONPATH": os.pathsep.join(roots)}
    done = run_forked(program, *words, env=env, cwd=at, anew=("shoprec",), first=without_pictures)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with this one in it, as installed."""
    site = tmp_path / "site"
    described = site / "shop_recommender-0.3.0.dist-info"
    for folder in (site / "shoprec", described):
        folder.mkdir(parents=True)
    (site / "shoprec" / "__init__.py").touch()
    (site / "shoprec" / "dcn.py").write_text(PACKAGE)
    for name, text in INSTALLED.items():
        (described / name).write_text(text)
    return site


@pytest.mark.distributed
def test_two_labels_of_a_package_of_ones_own_go_all_the_way(tmp_path: Path, site: Path) -> None:
    for name, program in (("ask_server", SERVE), ("ask_model", LOAD)):
        (site / f"{name}.py").write_text(program)
    run, model = tmp_path / "run", tmp_path / "model"
    two_labels = SCHEMA.replace('    { column = "stars", null = "unknown" },\n', "")
    (tmp_path / "schema.toml").write_text(two_labels)
    log = write_log(tmp_path / "log.csv")
    here = partial(ran, site)
    here("gmeta", "prepare", "--schema", tmp_path / "schema.toml", log, tmp_path / "data")
    config = TRAIN.format(data=tmp_path / "data", run=run).replace('loss = { stars = "mse" }\n', "")
    (tmp_path / "train.toml").write_text(config)
    command = ["train", tmp_path / "train.toml", "model.name=shop-dcn", "--nproc-per-node", "2"]
    command += ['evaluation.metrics=["auc", "spread"]']
    told = here("gmeta", *command, 'run.callbacks=["four-steps"]', "--json")
    assert json.loads(told)["run"] == str(run)  # what the callback prints is elsewhere
    assert 4 <= len(losses(run)) < 7  # stopped in front of one of the next steps
    killing = 'run.callbacks=["shoprec.dcn:KilledAtSeven"]'
    here("gmeta", *command, killing, "--resume", code=1)
    assert len(losses(run)) < 10
    here("gmeta", *command, "--resume")
    assert len(losses(run)) == 10
    of_labels = {"auc", "spread", "spread:click", "auc:buy|click"}
    assert of_labels <= set(metrics(run)[-1]["valid"])
    mine = {"package": "shop-recommender", "version": "0.3.0"}
    ran_on = json.loads((run / "environment.json").read_text())
    assert ran_on["plugins"] == {"model.name": mine, "evaluation.metrics: spread": mine}

    here("gmeta", "evaluate", run, "--no-trees", "--item-column", "item")
    found = json.loads((run / "evaluation" / "evaluation.json").read_text())
    table = pq.read_table(run / "evaluation" / "predictions.parquet")
    own = table.filter(np.array(table["run"]) == "run")
    for one, name in ((found, "after"), (found["labels"][0], "after:click")):
        (group,) = one["groups"]
        value = group["results"][1]["metrics"]["spread"]["value"]
        by_hand = np.std(own[name].to_numpy().astype(np.float64))
        assert value == pytest.approx(by_hand, rel=1e-8)

    here("gmeta", "export", run, model)
    assert here("ask_model", model).strip() == "shoprec.dcn (2, 2)"
    rows = pc.read_csv(log).drop_columns(["stars"]).slice(0, 12)
    sides = rows.slice(0, 8), rows.slice(8).drop_columns(["click", "bought"])
    (tmp_path / "request.json").write_text(json.dumps(request_of(sides, [])))
    answer = json.loads(here("ask_server", model, tmp_path / "request.json"))
    names = [one["name"] for one in answer["outputs"]]
    assert names == ["prediction_click", "prediction_buy"]
    click_N, buy_N = (np.array(one["data"]) for one in answer["outputs"])
    assert np.all((buy_N > 0) & (buy_N < click_N))  # the product of both

    # Where nobody installed it: one line, with what it was made with.
    missing = "'shop-dcn', which is not here: known are cbml"
    told = ran(tmp_path, "gmeta", "export", run, tmp_path / "other", code=1)
    assert f"{run} was made with model.name = {missing}" in told
    assert told.endswith("It was made with shop-recommender 0.3.0.\n"), told
    (tmp_path / "ask_model.py").write_text(LOAD)
    told = ran(tmp_path, "ask_model", model, code=1)
    assert told.splitlines()[-1].endswith("It was made with shop-recommender 0.3.0."), told
    told = ran(tmp_path, "gmeta", "serve", model, "--insecure", code=1)
    assert told.endswith("It was made with shop-recommender 0.3.0.\n"), told
