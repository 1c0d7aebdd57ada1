"""The live page through a job's life: a real service, processes as workers, a real browser."""

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gmeta.antdt import DatasetSpec, ShardClient
from gmeta.antdt.client.agent import WorkerAgent
from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from tests.antdt.faults.service_process import CONTEXT, ServiceProcess, free_port
from tests.support.browser import Browser, needs_browser, open_browser
from tests.support.waiting import wait_until

TTL_S = 30.0
SHARE = 16
STEPS_PER_SHARD = 20  # while nobody says that it is to end
SPEC = DatasetSpec("train", 600 * 16, 16, seed=1)
RANKS = ("rank0", "rank1", "rank2", "rank3")


def work(address: str, name: str, is_slow: Any, is_ending: Any) -> None:
    """A trainer without a model: it leases, steps, reports and saves as one does."""
    with ShardClient(address, name) as client:
        client.register_dataset(SPEC)
        agent = WorkerAgent(client, SHARE, lambda: "no")
        if name == "rank0":
            client.report_run("TRAINING", "/runs/ctr", 4000)
        step = 0
        for _ in client.shards("train"):
            for _ in range(1 if is_ending.value else STEPS_PER_SHARD):
                step += 1
                compute_ms = 240.0 if is_slow.value and name == "rank3" else 80.0
                agent.count_step(SHARE, compute_ms, 4.0, 4.0, 250.0 - compute_ms)
                if name == "rank0":
                    client.report_metrics(step, {"loss": 1 / step})
                if not is_ending.value:
                    time.sleep(0.02)
            if name == "rank0" and not is_ending.value:
                client.report_metrics(step, {"valid/auc": 0.75})
                manifest = client.prepare_checkpoint(f"step-{step}", step)
                client.commit_checkpoint(manifest)
        if name == "rank0":
            client.report_run("FINISHED", "/runs/ctr", 4000)


@contextmanager
def job(service: ServiceProcess, is_slow: Any, is_ending: Any) -> Iterator[list[Any]]:
    """Four workers, which are killed at the end at the latest."""
    workers = [
        CONTEXT.Process(target=work, args=(service.address, name, is_slow, is_ending), daemon=True)
        for name in RANKS
    ]
    for worker in workers:
        worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def metrics_of(service: ServiceProcess) -> str:
    url = f"http://{service.config.metrics_listen}/metrics"
    with urllib.request.urlopen(url) as answer:
        text: str = answer.read().decode()
    return text


def fits(browser: Browser) -> bool:
    """Whether the page is as wide as a phone, and as a screen, at most."""
    widths = []
    for width in (390, 1280):
        browser.resize(width)
        widths.append(browser.overflow())
    return widths == [0, 0]


@needs_browser
def test_the_page_tells_what_the_job_does(tmp_path: Path) -> None:
    watched = StragglerConfig(MonitorConfig(window_s=0.2), ControllerConfig(policy="nd"))
    service = ServiceProcess(tmp_path / "s.db", TTL_S)
    service.config = replace(
        service.config,
        job="ctr-model",
        metrics_listen=f"127.0.0.1:{free_port()}",
        stragglers=watched,
    )
    is_slow, is_ending = (CONTEXT.Value("b", 0, lock=False) for _ in range(2))
    service.start()
    service.wait_until_serving()
    try:
        with open_browser() as browser:
            browser.open(f"http://{service.config.metrics_listen}/")
            empty(browser)
            with job(service, is_slow, is_ending) as workers:
                running(browser)
                is_slow.value = 1
                slow(browser)
                for worker in workers:
                    worker.kill()
                    worker.join()
                service.let_time_pass(TTL_S + 1)
                killed(browser, service)
            is_slow.value = 0
            with job(service, is_slow, is_ending) as workers:
                browser.wait_for("#phase", "running")
                is_ending.value = 1
                for worker in workers:
                    worker.join()
                ended(browser, service)
            assert browser.faults() == []
            service.terminate()
            browser.wait_for("#link", "no contact with the service, trying again")
            service.start()
            service.wait_until_serving()
            browser.wait_for("#link", "live")
            ended(browser, service)
            assert browser.text("#workers tbody").count("done") == 4
            assert browser.text("#decisions") == "none since this service began"
    finally:
        service.kill()


def empty(browser: Browser) -> None:
    browser.wait_for("#link", "live")
    assert browser.text("#job") == "Job ctr-model"
    assert browser.text("#phase") == "waiting for workers"
    assert browser.text("#told").startswith("No worker has come yet, and no data set: both come")
    values = browser.texts("#tiles dd")
    assert values[:5] == ["\u2013", "\u2013", "\u2013", "0", "\u2013"]
    assert browser.text("#workers tbody").startswith("none has registered yet")
    assert browser.text("#curves").startswith("loss and validation come with the trainer")
    assert fits(browser)


def running(browser: Browser) -> None:
    browser.wait_for("#phase", "running")
    browser.wait_for("#data h2", "of 600 shards trained")
    browser.wait_for("#curves", "validation auc")
    browser.wait_for("#curves", "step 1 to ")  # the loss
    browser.wait_for("#workers tbody", "healthy")
    browser.wait_for("#checkpoints", "committed")
    browser.wait_for("#audit", "every unit accounted for")
    assert browser.text("#told") == ""
    assert browser.driver.title == "ctr-model: running"


def slow(browser: Browser) -> None:
    browser.wait_for("#phase", "1 slow")
    wait_until(lambda: "slow: rank3" in browser.text("#tiles"), "the tile of stragglers")
    browser.wait_for("#workers tbody", "transient: compute")
    assert "rank3" in browser.texts("#workers tbody tr")[0]  # the slowest first
    assert "times the others' time per task" in browser.texts("#workers tbody tr")[1]
    browser.wait_for("#decisions", "shared the tasks")
    wait_until(lambda: len(browser.texts("#shares .mark")) > 0, "the mark of an action")
    assert len(browser.texts("#shares .share")) == 4
    assert fits(browser)


def killed(browser: Browser, service: ServiceProcess) -> None:
    browser.wait_for("#phase", "no worker is heard of")
    assert browser.text("#told").startswith("Shards are left, and all workers are silent.")
    assert browser.texts("#tiles dd")[0] == "0.0"
    assert browser.texts("#tiles dd")[3] == "0 of 4"
    assert browser.text("#workers tbody").count("silent for ") == 4
    read = metrics_of(service)
    assert 'antdt_phase{phase="gone"} 1.0' in read
    assert 'antdt_phase{phase="running"} 0.0' in read
    assert "antdt_job_tasks_per_s 0.0" in read
    assert "antdt_workers_silent 4.0" in read
    assert "antdt_worker_tasks_per_s{" not in read


def ended(browser: Browser, service: ServiceProcess) -> None:
    browser.wait_for("#phase", "ended")
    assert browser.text("#told") == "The run is finished. The service can be stopped."
    assert "gmeta evaluate /runs/ctr" in browser.text("#run")
    assert "epoch 1: 100.0 % of 600 shards trained" in browser.text("#data h2")
    assert "last loss" in browser.text("#tiles")
    browser.wait_for("#curves", "step 1 to ")  # the loss
    read = metrics_of(service)
    assert 'antdt_phase{phase="ended"} 1.0' in read
    assert "antdt_job_tasks_per_s 0.0" in read
