"""What a stream's history costs: the parts of delivery.py that look at many increments, or ids."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _common import REPOSITORY

from gmeta.errors import GMetaError
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.stage_process import last_line, run_stage
from gmeta.serving.channel.champion_judge import judge, windows_before
from metaio.recipes.synthetic_days import DaysConfig, write_days
from metaio.stream.chain import Stream, name_increment_folder, open_stream
from metaio.stream.numbering import Admission, Numbering, Occurrences, advance

_EARLY = 5  # the increment that later ones are held against
_BESIDE = 1  # so many increments on either side count too: the median of three
MARGIN = 0.5  # what is promoted is no matter here, as long as the loop goes on


def grown(root: Path, increments: int, users: int) -> dict[str, Any]:
    """Return what an increment costs at the end over increment 5, all stages of the loop together,
    and how its model scores against one trained on all at once and one frozen after the first."""
    root.mkdir()
    write_days(str(root / "logs"), DaysConfig(increments, users))
    config = root / "stream.toml"
    config.write_text(
        f'[follow]\ninputs = "{root}/logs/day=*"\nschema = "{root}/logs/schema.toml"\n'
        f'stream = "{root}/stream"\ntrain = "{REPOSITORY}/examples/stream/train.toml"\n'
        f'runs = "{root}/runs"\nchannel = "{root}/channel"\nkeep = 4\n'
        f"[judge]\nmargin = {MARGIN}\n"
    )
    loop = Pipeline(load_follow_config(config), run_stage, last_line)
    took_s: dict[int, float] = {}
    while True:
        began_s = time.perf_counter()
        try:
            done = loop.step()
        except GMetaError as error:
            sys.exit(f"the loop: {error}")
        if done is None:
            break
        # With what the loop itself reads of the past.
        took_s[done.increment] = took_s.get(done.increment, 0.0) + time.perf_counter() - began_s
    last = increments - _BESIDE
    early_s, late_s = (
        statistics.median(took_s[one] for one in range(at - _BESIDE, at + _BESIDE + 1))
        for at in (_EARLY, last)
    )
    found = {"cost_growth": round(late_s / early_s, 3), "cost_growth_increments": [_EARLY, last]}
    return found | _compared(root, increments, loop)


def _compared(root: Path, increments: int, loop: Pipeline) -> dict[str, Any]:
    """Return the scores of three models on the gate tasks of the last increment."""
    served = loop.continued_from(increments + 1)
    assert served is not None
    stages = [["prepare", "--extend", root / "anew", "--schema", root / "logs/schema.toml"]]
    files = sorted((root / "logs").glob("day=*/clicks.parquet"))
    # The moments are those of a stream's first increment: so is the retrained model's.
    stages[0].append(files[0])
    stages.append(["prepare", "--extend", root / "anew", *files[1:]])
    train = ["train", REPOSITORY / "examples/stream/train.toml", "run.prequential=false"]
    for arguments in stages:
        _run(root, arguments)
    # As many rows for each row of the log as the increments train, in whole epochs.
    ours, theirs = (open_stream(str(root / name)) for name in ("stream", "anew"))
    increments_rows = sum(_train_rows(ours, one) for one in range(2, increments + 1))
    epochs = {1: 1, 2: max(1, increments_rows // _train_rows(theirs, 2))}
    for number, before in ((1, ""), (2, root / "retrained-1")):
        run = [f"data.path={root}/anew", f"data.increment={number}", f"run.epochs={epochs[number]}"]
        run += [f"run.dir={root}/retrained-{number}", f"run.continue_from={before}"]
        _run(root, [*train, *run])
    _run(root, ["export", root / "retrained-2", root / "retrained"])
    windows = windows_before(open_stream(str(root / "stream")).dataset(increments))
    model = root / "runs" / name_increment_folder(served) / "model"
    frozen = root / "frozen"
    found: dict[str, Any] = {}
    if not frozen.exists():
        log = root / "frozen.log"
        if run_stage(["export", str(root / "retrained-1"), str(frozen)], log):
            sys.exit(f"the frozen model: {last_line(log)}")
    for name, other in (("retrain", root / "retrained"), ("frozen", frozen)):
        verdict = judge(model, other, windows, "gate", 0.0, pool=3)
        ours, theirs = (one["auc"] for one in (verdict.candidate, verdict.champion))
        assert ours is not None
        assert theirs is not None
        assert verdict.difference is not None
        found[f"auc_minus_{name}"] = round(ours - theirs, 4)
        ends = (verdict.difference.low, verdict.difference.high)
        found[f"logloss_better_than_{name}_95"] = [one and round(one, 5) for one in ends]
    return found | {"gate_tasks": verdict.num_tasks, "retrain_epochs": epochs[2]}


def _run(root: Path, arguments: list[Any]) -> None:
    log = root / "retrain.log"
    if run_stage([str(one) for one in arguments], log):
        sys.exit(f"{arguments}: {last_line(log)}")


def _train_rows(stream: Stream, number: int) -> int:
    return stream.dataset(number).splits["train"].num_rows


def numbered(num_ids: int) -> dict[str, Any]:
    """Return how much faster an increment is numbered than the vocabulary of all `num_ids` ids is
    rebuilt: a twenty-fourth of the occurrences, a fifth of them of new ids."""
    rng = np.random.default_rng(0)
    rule = Admission(1, 0)
    past = rng.permutation(num_ids)
    size = num_ids // 24
    window = np.concatenate([rng.choice(past, size * 4 // 5), num_ids + np.arange(size // 5)])

    def occurrences(ids: Any, start: int) -> Occurrences:
        return Occurrences.of(pa.array(ids), start + np.arange(len(ids)), 1)

    state, _ = advance(Numbering.empty(pa.int64()), occurrences(past, 0), rule)
    began_s = time.perf_counter()
    grown_on, _ = advance(state, occurrences(window, num_ids), rule)
    one_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    empty = Numbering.empty(pa.int64())
    anew, _ = advance(empty, occurrences(np.concatenate([past, window]), 0), rule)
    all_s = time.perf_counter() - began_s
    if not grown_on.vocabulary().equals(anew.vocabulary()):
        sys.exit("numbering in two steps gave other rows than in one")
    return {"numbering_speedup": round(all_s / one_s, 2), "numbered_ids": num_ids}
