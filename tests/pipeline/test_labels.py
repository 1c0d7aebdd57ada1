"""A stream of two labels goes round the loop: judged, promoted, followed, and served with both."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gmeta
from gmeta.config.losses import LOSSES, RANGES
from gmeta.losses.row_losses import defined_labels_N
from gmeta.pipeline.pipeline_status import read_status
from gmeta.pipeline.stream_page import render_stream
from gmeta.serving.channel.channel import Channel
from metaio.stream.chain import list_increment_numbers, open_stream
from tests.pipeline.days import write_day, write_loop
from tests.pipeline.following import loop_of, stages_of
from tests.serving.server.serving import post, request_of, service_of

NAMES = ["prediction_click", "prediction_buy"]


def write_buys(folder: Path) -> None:
    """Add a second label to a day: purchases, among its clicks alone."""
    path = folder / "part-0.parquet"
    table = pq.ParquetFile(path).read()  # not the day that its folder is named by
    rng = np.random.default_rng(7)
    buy_N = table["click"].to_numpy() * (rng.random(len(table)) < 0.5)
    pq.write_table(table.append_column("buy", pa.array(buy_N, pa.float32())), path)


def test_the_loop_knows_which_labels_each_loss_takes() -> None:
    label_N = np.array([-1, 0, 0.5, 1, 2], np.float32)
    for loss in LOSSES:
        least, most = RANGES.get(loss, (-np.inf, np.inf))
        defined_N = (label_N >= least) & (label_N <= most)
        assert defined_N.tolist() == defined_labels_N(loss, label_N).tolist()


@pytest.mark.distributed
def test_a_candidate_of_two_labels_is_promoted_followed_and_served(tmp_path: Path) -> None:
    config = write_loop(tmp_path, margin=9)
    schema, train = tmp_path / "schema.toml", tmp_path / "train.toml"
    schema.write_text(
        schema.read_text().replace(
            '[label]\ncolumn = "click"', '[[label]]\ncolumn = "click"\n[[label]]\ncolumn = "buy"'
        )
    )
    train.write_text(train.read_text() + '[labels]\nentire_space = { buy = "click" }\n')
    channel, loop = Channel(tmp_path / "channel"), loop_of(config)
    write_buys(write_day(tmp_path / "logs", 0))
    stages_of(loop)
    assert channel.require_current().number == 1
    rows = pq.ParquetFile(tmp_path / "logs/day=000/part-0.parquet").read().sort_by("user")
    support, query = rows.slice(0, 4), rows.slice(4, 2)  # a user has six
    with gmeta.follow(channel.root, every_s=0) as follower, service_of(channel.root) as service:
        before_NL = follower.model.adapt(support).predict(query).numpy()
        write_buys(write_day(tmp_path / "logs", 1))
        stages_of(loop)
        assert channel.require_current().number == 2
        assert follower.check()
        assert service.reload()
        after_NL = follower.model.adapt(support).predict(query).numpy()
        assert after_NL.shape == (query.num_rows, 2)
        assert (np.abs(after_NL - before_NL).max(axis=0) > 0).all()
        # The probability of a purchase is that of a click times that of one among clicks.
        assert (after_NL[:, 1] < after_NL[:, 0]).all()
        found = post(service, request_of(query.drop_columns(["buy", "at"]), support, outputs=NAMES))
        assert found.status_code == 200, found.text
        told_NL = np.column_stack([one["data"] for one in found.json()["outputs"]])
        np.testing.assert_allclose(told_NL, after_NL, rtol=0, atol=1e-6)
    titles = re.findall("<figcaption>(.*?)</figcaption>", render_stream(loop, read_status(loop)))
    assert "AUC before training on it (prequential)" in titles
    assert "AUC of buy before training on it (prequential)" in titles


@pytest.mark.distributed
def test_a_loop_whose_labels_come_late_judges_what_is_ripe(tmp_path: Path) -> None:
    config, logs = write_loop(tmp_path, margin=9), tmp_path / "logs"
    schema = tmp_path / "schema.toml"
    late = '[row_id]\ncolumn = "row"\n[label]\ncolumn = "click"\nmatures = "24h"'
    schema.write_text(schema.read_text().replace('[label]\ncolumn = "click"', late))
    loop, before = loop_of(config), None
    for day in range(3):
        path = write_day(logs, day, done=False) / "part-0.parquet"
        table = pq.ParquetFile(path).read()
        table = table.append_column("row", pa.array(day * 1_000 + np.arange(len(table))))
        if before is not None:  # a fifth of the day before, whose clicks have come since
            ones = pa.array(np.ones(len(before), np.float32))
            before = before.set_column(before.column_names.index("click"), "click", ones)
            pq.write_table(pa.concat_tables([table, before.slice(0, len(before) // 5)]), path)
        else:
            pq.write_table(table, path)
        (path.parent / "_SUCCESS").touch()
        before = table
        stages_of(loop)
        # The first day waits until a label of it is ripe.
        assert len(list_increment_numbers(str(tmp_path / "stream"))) == day
    verdict = json.loads((tmp_path / "runs/000002/verdict.json").read_text())
    forecast = json.loads((tmp_path / "runs/000002/run/prequential.json").read_text())
    report = open_stream(str(tmp_path / "stream")).newest.report
    waiting = {split: own["click"]["waiting"] for split, own in report["labels"].items()}
    assert verdict["num_waiting"] == waiting["gate"] > 0
    assert {name: own["waiting"] for name, own in forecast["splits"].items()} == waiting
    assert report["account"]["corrections"] == len(before) // 5
    assert 0 < verdict["num_rows"] < sum(one["click"]["ripe"] for one in report["labels"].values())
