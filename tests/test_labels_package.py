"""Somebody's own package with DCN-v2 of two labels, a metric and a callback, from outside the
repository: two ranks, resumed, evaluated, exported, served."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

from tests.commands import environment, losses, metrics
from tests.forked import run_forked
from tests.labelled import SCHEMA, TRAIN, write_log
from tests.server.test_labels import request_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = '''
import numpy as np
import torch
from torch import nn

from gmeta.hooks.callback import Callback
from gmeta.metrics.own import Metric


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


def spread(label_N, prediction_N, task_N):
    return float(np.std(prediction_N))


SPREAD = Metric(spread, "spread", True, "Standard deviation of what is predicted.")
'''
SERVE = """
import json, sys
from pathlib import Path
from tests.server.serving import post, service_of
with service_of(Path(sys.argv[1])) as service:
    print(post(service, json.loads(Path(sys.argv[2]).read_text())).text)
"""


def ran(at: Path, program: str, *arguments: str | Path) -> str:
    """The output of `python -m PROGRAM` in the folder of the package, which must not fail."""
    roots = [str(at), str(ROOT), str(ROOT / "models"), str(ROOT / "protos")]
    env = {**environment(), "PYTHONPATH": os.pathsep.join(roots), "GMETA_PLUGINS": "shoprec"}
    done = run_forked(program, *arguments, env=env, cwd=at, anew=("shoprec",))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.distributed
def test_two_labels_of_a_package_of_ones_own_go_all_the_way(tmp_path: Path) -> None:
    (tmp_path / "shoprec").mkdir()
    (tmp_path / "shoprec" / "__init__.py").touch()
    (tmp_path / "shoprec" / "dcn.py").write_text(PACKAGE)
    (tmp_path / "ask_server.py").write_text(SERVE)
    run, model = tmp_path / "run", tmp_path / "model"
    two_labels = SCHEMA.replace('    { column = "stars", null = "unknown" },\n', "")
    (tmp_path / "schema.toml").write_text(two_labels)
    log = write_log(tmp_path / "log.csv")
    ran(tmp_path, "gmeta", "prepare", "--schema", tmp_path / "schema.toml", log, tmp_path / "data")
    config = TRAIN.format(data=tmp_path / "data", run=run).replace('loss = { stars = "mse" }\n', "")
    (tmp_path / "train.toml").write_text(config)
    chosen = ["model.name=shoprec.dcn:DCNv2", 'run.callbacks=["shoprec.dcn:FourSteps"]']
    chosen += ['evaluation.metrics=["auc", "shoprec.dcn:SPREAD"]', "--nproc-per-node", "2"]
    told = ran(tmp_path, "gmeta", "train", tmp_path / "train.toml", *chosen, "--json")
    assert json.loads(told)["run"] == str(run)  # what the callback prints is elsewhere
    assert 4 <= len(losses(run)) < 10  # stopped in front of one of the next steps
    again = [*chosen[:1], "run.callbacks=[]", *chosen[2:]]
    ran(tmp_path, "gmeta", "train", tmp_path / "train.toml", *again, "--resume")
    assert len(losses(run)) == 10
    of_labels = {"auc", "shoprec.dcn:SPREAD", "shoprec.dcn:SPREAD:click", "auc:buy|click"}
    assert of_labels <= set(metrics(run)[-1]["valid"])

    ran(tmp_path, "gmeta", "evaluate", run, "--no-trees", "--item-column", "item")
    found = json.loads((run / "evaluation" / "evaluation.json").read_text())
    table = pq.read_table(run / "evaluation" / "predictions.parquet")
    own = table.filter(np.array(table["run"]) == "run")
    for one, name in ((found, "after"), (found["labels"][0], "after:click")):
        (group,) = one["groups"]
        value = group["results"][1]["metrics"]["shoprec.dcn:SPREAD"]["value"]
        by_hand = np.std(own[name].to_numpy().astype(np.float64))
        assert value == pytest.approx(by_hand, rel=1e-8)

    ran(tmp_path, "gmeta", "export", run, model)
    rows = pc.read_csv(log).drop_columns(["stars"]).slice(0, 12)
    sides = rows.slice(0, 8), rows.slice(8).drop_columns(["click", "bought"])
    (tmp_path / "request.json").write_text(json.dumps(request_of(sides, [])))
    answer = json.loads(ran(tmp_path, "ask_server", model, tmp_path / "request.json"))
    names = [one["name"] for one in answer["outputs"]]
    assert names == ["prediction_click", "prediction_buy"]
    click_N, buy_N = (np.array(one["data"]) for one in answer["outputs"])
    assert np.all((buy_N > 0) & (buy_N < click_N))  # the product of both
