"""What a training rank tells Prometheus, and who may ask."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from gmeta.config.train_config import config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.errors import UserError
from gmeta.runs.logging.callback import Callback, Run
from gmeta.runs.logging.logger import RunInfo
from gmeta.runs.logging.rank_metrics import RankMetrics
from gmeta.training import train
from tests.distributed.harness import on_ranks
from tests.distributed.test_own_parts import described
from tests.serving.server.serving import free_port
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S


def metrics_of(folder: Path) -> RankMetrics:
    ranks: Any = SimpleNamespace(rank=1, world_size=2, device=torch.device("cpu"))
    return RankMetrics(RunInfo(folder, {}, "auc", done_steps=4, total_steps=9), ranks, lambda: 2.5)


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_steps_readings_and_checkpoints_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GMETA_METRICS", "127.0.0.1:0")
    metrics = metrics_of(tmp_path)
    metrics.listen()
    try:
        metrics.count_step(5, 30)
        metrics.count_step(6, 12)
        metrics.show({"loss": 0.5, "dense_grad_norm": None})
        metrics.show_scores({"auc": 0.75})
        url = f"http://127.0.0.1:{metrics.port}/metrics"
        found = samples(httpx.get(url, timeout=PATIENCE_S).text)
    finally:
        metrics.stop()
    assert found["gmeta_train_steps_total"] == 2
    assert found["gmeta_train_rows_total"] == 42
    assert (found["gmeta_train_step"], found["gmeta_train_planned_steps"]) == (6, 9)
    assert found["gmeta_train_data_wait_seconds_total"] == 2.5
    assert found["gmeta_train_valueloss"] == 0.5
    assert found["gmeta_train_valuedense_grad_norm"] != found["gmeta_train_valuedense_grad_norm"]
    assert found["gmeta_train_validationauc"] == 0.75
    assert found[f"gmeta_train_info12{tmp_path.name}"] == 1
    assert found["gmeta_train_checkpoint_timestamp_seconds"] == 0
    metrics.note_checkpoint()
    now = metrics.registry.get_sample_value("gmeta_train_checkpoint_timestamp_seconds")
    assert now is not None
    assert now > 1e9


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("0.0.0.0:9400", "GMETA_METRICS = 0.0.0.0:9400 can be reached from other machines. Set "
         "GMETA_METRICS_TLS_CERT, _TLS_KEY and one of _TOKENS and _TLS_CLIENT_CA; or listen on "
         "127.0.0.1"),
        ("9400", "GMETA_METRICS is '9400'; allowed is HOST:PORT with a port from 0 (any free one) "
         "to 65535, such as 0.0.0.0:7070. Correct it."),
    ],
)  # fmt: skip
def test_an_address_that_is_wrong_or_open_to_all_is_refused(
    address: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GMETA_METRICS", address)
    assert catch_message(UserError, metrics_of(tmp_path).listen) == told


def test_a_taken_port_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GMETA_METRICS", "127.0.0.1:0")
    first = metrics_of(tmp_path)
    first.listen()
    try:
        monkeypatch.setenv("GMETA_METRICS", f"127.0.0.1:{first.port - 1}")
        monkeypatch.setenv("LOCAL_RANK", "1")
        told = catch_message(UserError, metrics_of(tmp_path).listen)
    finally:
        first.stop()
    assert told.endswith(
        f"cannot listen on port {first.port}, Address already in use. Each rank of a machine takes "
        "the next port; choose another"
    )


class Asking(Callback):
    """Asks its own rank at the end."""

    def on_train_end(self, run: Run, status: str) -> None:
        """Ask, over HTTP."""
        host, port = os.environ["GMETA_METRICS"].split(":")
        url = f"http://{host}:{int(port) + run.rank}/metrics"
        (run.info.folder / f"metrics-{run.rank}").write_text(
            httpx.get(url, timeout=PATIENCE_S).text
        )


def trained(ranks: Ranks, config: Any, port: int) -> dict[str, float]:
    os.environ["GMETA_METRICS"] = f"127.0.0.1:{port}"
    folder = train(config_from_dict(config), ranks).root
    return samples((folder / f"metrics-{ranks.rank}").read_text())


@pytest.mark.distributed
def test_each_rank_of_a_run_tells_its_own(tmp_path: Path) -> None:
    config = described(tmp_path, dir=str(tmp_path / "run"), epochs=1)
    config["run"]["callbacks"] = [f"{__name__}:Asking"]
    one, other = on_ranks(2, trained, config, free_port())
    assert one["gmeta_train_steps_total"] == other["gmeta_train_steps_total"] == 8
    assert one["gmeta_train_valueloss"] == other["gmeta_train_valueloss"]
    rows = [each["gmeta_train_rows_total"] for each in (one, other)]
    assert 0 < min(rows) <= max(rows) < sum(rows)
    assert one["gmeta_train_checkpoint_timestamp_seconds"] > 1e9
