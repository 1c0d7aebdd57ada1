"""From a partition of a log to a served model: what an increment costs, ships and breaks.

A log of equal partitions (the recipe synthetic-days). `increment_s`: the last partition from
landing to served (prepare --extend, train, export, judge, promote, taken up by gmeta.follow);
`increment_stages_s` has the stages. `speedup_100` (with --quick only by --speedup, of 24:
`speedup_24`): that against preparing, training and exporting all partitions and loading the model;
both by the processes of `gmeta follow`, whose imports neither side pays for, once each. Both train
as many rows for each row of the log: an increment's episodes hold rows from before it, so what is
trained anew takes `anew_epochs` of its own; `speedup_one_epoch` is against one epoch.
`cost_growth`: a late increment of the loop over increment 5, all stages; `auc_minus_retrain` and
`auc_minus_frozen`: its model on gate tasks of the last increments against one trained on the first
partition and then on all others at once, and one trained on the first alone, with the paired 95 %
interval of the loss. `numbering_speedup`: ids of an increment numbered against all ids anew.
`delta_over_touched`: bytes of a delta over those of the full model, over the share of rows that
changed, of a table of a million rows, the largest of four. `gate_caught`: candidates trained on
flipped labels, with rates x100, and with NaN, that the gate refuses; `aa_refused`: noisy copies of
the champion that it refuses. `swap_p99_ratio`: the p99 of predictions while a follower takes up
another version, from the moment the pointer moved until it serves, over that of as long without, in
turns: medians over the turns, and quartiles of their ratios; `beside_p99_ratio`: the same while
another process loads that version instead, which is what the machine's cores make of it;
`failed_requests` of all. `late_label_gap_closed`: of clicks that are reported 12 hours late on
average, the share of the logloss between a stream that knows labels as first seen and one that
knows all at once which the better of `wait` (`[label] matures`) and `weigh` (fake-negative weights)
wins back, on the next day; `late_labels` has all scores. `minute_cost_ratio`: seconds from a
minute's messages in a topic of Kafka to the version that knows them, over 60: below 1 the loop
keeps up."""

import multiprocessing as mp
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import REPOSITORY, environment, finish, make_parser, print_table
from _delivery_history import grown, numbered
from _delivery_minutes import followed_minutes
from _late_labels import late_labels
from safetensors.torch import load_file, save_file

import gmeta
from gmeta.pipeline.stage_process import last_line, run_stage
from gmeta.platform.files.checksums import describe_file
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.serving.channel.champion_judge import judge, windows_before
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.exported_folder import read_config, table_file, write_config
from metaio.format.dataset import open_dataset
from metaio.recipes.synthetic_days import DaysConfig, write_days
from metaio.stream.chain import name_increment_folder

EXAMPLE = REPOSITORY / "examples" / "stream"
MARGIN = 0.02


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    partitions: int
    users: int
    table_rows: int
    copies: int
    swaps: int
    increments: int  # of the loop whose costs and scores are followed
    loop_users: int
    ids: int
    minutes: int  # of a topic that is followed
    late_days: int
    late_users: int


QUICK = Sizes(12, 1_000, 1_000_000, 10, 3, 9, 200, 1_000_000, 3, 4, 600)
FULL = Sizes(100, 3_000, 10_000_000, 100, 40, 51, 500, 10_000_000, 30, 10, 4_000)
# With fewer, what each stage costs of itself is most of an increment.
QUICK_SPEEDUP = replace(QUICK, partitions=24, users=2_500)


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--speedup", action="store_true", help="speedup_24 or speedup_100 alone")
    parser.add_argument("--late-labels", action="store_true", help="late_label_gap_closed alone")
    parser.add_argument("--minutes", action="store_true", help="minute_cost_ratio alone")
    parser.add_argument("--numbering", action="store_true", help="numbering_speedup alone")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    if options.numbering:
        finish("delivery", {**numbered(sizes.ids), "environment": environment()})
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.speedup:
            found = delivered(root, QUICK_SPEEDUP if options.quick else FULL, against_anew=True)
            finish("delivery", {**found, "environment": environment()})
            return
        if options.minutes:
            found = followed_minutes(root / "minutes", sizes.minutes, 200)
            finish("delivery", {**found, "environment": environment()})
            return
        if options.late_labels:
            found = late_labels(root / "late", sizes.late_days, sizes.late_users, stage)
            finish("delivery", {**found, "environment": environment()})
            return
        figures: dict[str, Any] = {"partitions": sizes.partitions}
        took_s = {}
        for part, measured in {
            "delivered": lambda: delivered(root, sizes, against_anew=not options.quick),
            "gate": lambda: gate(root, sizes),
            "swapped": lambda: swapped(root, sizes),
            "touched": lambda: touched(root, sizes),
            "grown": lambda: grown(root / "loop", sizes.increments, sizes.loop_users),
            "numbered": lambda: numbered(sizes.ids),
            "late": lambda: late_labels(root / "late", sizes.late_days, sizes.late_users, stage),
            "minutes": lambda: followed_minutes(root / "minutes", sizes.minutes, 200),
        }.items():
            began_s = time.perf_counter()
            figures |= measured()
            took_s[part] = round(time.perf_counter() - began_s, 1)
        figures["took_s"] = took_s
    rows = [[name, str(value)] for name, value in figures.items()]
    print_table(["figure", "value"], rows)
    finish("delivery", {**figures, "environment": environment()})


def stage(root: Path, *arguments: object, allowed: tuple[int, ...] = (0,)) -> int:
    """A command of gmeta as the loop runs it; its exit code."""
    log = root / "stage.log"
    log.unlink(missing_ok=True)
    code = run_stage([str(one) for one in arguments], log)
    if code not in allowed:
        sys.exit(f"{arguments}: {code}: {last_line(log)}")
    return code


def delivered(root: Path, sizes: Sizes, against_anew: bool) -> dict[str, Any]:
    """What an increment costs, and that against everything anew."""
    logs = root / "logs"
    write_days(str(logs), DaysConfig(sizes.partitions, sizes.users))
    files = files_of(root)
    schema, channel = logs / "schema.toml", Channel(root / "channel")
    # Imports, and the kernels that torch builds once: neither side pays for them.
    stage(root, "prepare", "--schema", schema, "--extend", root / "warm", files[0])
    train(root, root / "warm", 1, root / "warm-run")
    stream, runs = root / "stream", root / "runs"
    # Cut anywhere a log becomes the same stream, so all partitions but one may come at once.
    stage(root, "prepare", "--schema", schema, "--extend", stream, *files[:-1])
    # What was before is no part of the figure: some of its steps are as good.
    train(root, stream, 1, runs / "1", None, "run.max_steps=150")
    stage(root, "promote", runs / "1", channel.root)
    shutil.copytree(stream, root / "flipped")  # for `gate`
    follower = gmeta.follow(channel.root, every_s=0)
    began_s, stages_s = time.perf_counter(), {}

    def ended(name: str) -> None:
        stages_s[name] = round(time.perf_counter() - began_s - sum(stages_s.values()), 3)

    stage(root, "prepare", "--extend", stream, files[-1])
    ended("prepare")
    train(root, stream, 2, runs / "2", runs / "1", "run.max_steps=0")
    ended("train")
    stage(root, "export", runs / "2", root / "model-2")
    ended("export")
    arguments = ["--champion", channel.root, "--on", increment(stream, 2), "--margin", MARGIN]
    code = stage(root, "judge", root / "model-2", *arguments, allowed=(0, 3))
    ended("judge")
    stage(root, "promote", root / "model-2", channel.root)
    ended("promote")
    follower.check()
    ended("taken up")
    one_s = time.perf_counter() - began_s
    if follower.served.number != 2:
        sys.exit(f"version 2 does not serve: {follower.refused}")
    newest = channel.version(2)
    found = {
        "increment_s": round(one_s, 2),
        "increment_stages_s": stages_s,
        "last_promoted": code == 0,
        "last_kind": newest.kind,
    }
    if against_anew:
        anew = retrained(root, schema, files, rows_of(stream, 2) * len(files))
        found[f"speedup_{len(files)}"] = round(anew.took_s / one_s, 2)
        found["speedup_one_epoch"] = round(anew.one_epoch_s / one_s, 2)
        found |= {"anew_s": round(anew.took_s, 2), "anew_epochs": anew.epochs}
    return found


@dataclass(frozen=True)
class Anew:
    """What everything anew costs, and what it would with one epoch."""

    took_s: float
    one_epoch_s: float
    epochs: int


def retrained(root: Path, schema: Path, files: list[Path], most_rows: int) -> Anew:
    """Prepare, train, export and load everything anew: in as many whole epochs as train no more
    than `most_rows`."""
    began_s, began_at_s = time.perf_counter(), time.time()
    stage(root, "prepare", "--schema", schema, "--extend", root / "anew", *files)
    epochs = max(1, most_rows // rows_of(root / "anew", 1))
    run = root / "anew-run"
    # A checkpoint an epoch, as an increment has one.
    train(root, root / "anew", 1, run, None, f"run.epochs={epochs}", "run.keep_last=100")
    trained_s = time.perf_counter() - began_s
    stage(root, "export", run, root / "anew-model")
    gmeta.load(root / "anew-model")
    took_s = time.perf_counter() - began_s
    first = list_checkpoints(RunFolder(run).checkpoints)[0]
    one_epoch_s = first.stat().st_mtime - began_at_s + took_s - trained_s
    return Anew(took_s, one_epoch_s, epochs)


def rows_of(stream: Path, number: int) -> int:
    """The rows of the episodes that an increment trains in an epoch."""
    return open_dataset(str(increment(stream, number))).splits["train"].num_rows


def files_of(root: Path) -> list[Path]:
    """The partitions, oldest first."""
    return sorted((root / "logs").glob("day=*/clicks.parquet"))


def increment(stream: Path, number: int) -> Path:
    """The dataset of an increment."""
    return stream / "increments" / name_increment_folder(number)


def train(
    root: Path, stream: Path, number: int, run: Path, before: Path | None = None, *more: str
) -> None:
    """Train on an increment."""
    places = [f'data.path="{increment(stream, number)}"', f'run.dir="{run}"']
    if before is not None:
        places.append(f'run.continue_from="{before}"')
    stage(root, "train", EXAMPLE / "train.toml", *places, "run.prequential=false", *more)


def gate(root: Path, sizes: Sizes) -> dict[str, Any]:
    """Which broken candidates the gate refuses, and how many that are as good."""
    stream, runs = root / "stream", root / "runs"
    champion, windows = root / "model-2", windows_before(open_dataset(str(increment(stream, 2))))
    flipped, log = root / "flipped", root / "flipped.parquet"
    table = pq.read_table(files_of(root)[-1])
    click = pa.array(1 - table["click"].to_numpy())
    pq.write_table(table.set_column(table.column_names.index("click"), "click", click), log)
    # The stream's own screen would refuse it first, by its mean label.
    stage(root, "prepare", "--accept", "--extend", flipped, log)
    train(root, flipped, 2, runs / "flipped", runs / "1")
    wild = ("outer.dense_lr=0.3", "outer.sparse_lr=5.0")
    train(root, stream, 2, runs / "wild", runs / "1", *wild)
    caught = {}
    for name in ("flipped", "wild"):
        candidate = root / f"model-{name}"
        stage(root, "export", runs / name, candidate, allowed=(0, 3))
        caught[name] = not candidate.exists() or not (
            judge(candidate, champion, windows, "gate", MARGIN).promote
        )
    spoilt = noisy(champion, root / "nan", 0, np.nan)
    caught["nan"] = not judge(spoilt, champion, windows, "gate", MARGIN).promote
    refused = 0
    for seed in range(sizes.copies):
        copy = noisy(champion, root / "copy", seed, 0.02)
        refused += not judge(copy, champion, windows, "gate", MARGIN).promote
        shutil.rmtree(copy)
    return {
        "gate_caught": sum(caught.values()),
        "gate_of": len(caught),
        "not_caught": [name for name, is_caught in caught.items() if not is_caught],
        "aa_refused": round(refused / sizes.copies, 3),
    }


def noisy(model: Path, folder: Path, seed: int, noise: float) -> Path:
    """A copy of an exported model whose rows are off by some of their spread."""
    shutil.copytree(model, folder)
    config, files = read_config(folder), {}
    drawn = torch.Generator().manual_seed(seed)
    for index in range(len(config.features.tables)):
        file = folder / table_file(index)
        values = load_file(file)["values"].clone()
        values += noise * values.std() * torch.randn(values.shape, generator=drawn)
        save_file({"values": values}, file)
        files[file.name] = describe_file(file)
    write_config(folder, replace(config, files={**config.files, **files}))
    return folder


def swapped(root: Path, sizes: Sizes) -> dict[str, Any]:
    """Latencies of two threads that predict while a follower takes up another version, while
    nothing else happens, and while another process loads that version instead, in turns."""
    channel = Channel(root / "swaps")
    channel.promote(root / "model-2")
    packed = root / "swap.packed"
    pack(channel, noisy(root / "model-2", root / "swap.model", 1, 0.02), packed, False)
    channel.promote(packed)
    folders = {number: materialize_version(channel, number) for number in (1, 2)}
    # Of the rows of one user as a server is asked: it knows no row's identity.
    rows = pq.read_table(files_of(root)[0]).slice(0, 120).drop_columns(["user", "row", "p_click"])
    support, query = rows.slice(0, 20), rows.slice(20)
    failed, swap_s = 0, []
    turns: dict[str, list[list[float]]] = {"swap": [], "still": [], "beside": []}
    with (
        gmeta.follow(channel.root, every_s=0.01) as follower,
        ThreadPoolExecutor(2) as pool,
        ProcessPoolExecutor(1, mp.get_context("forkserver")) as other,
    ):
        other.submit(load_whole, folders[1]).result()

        def ask(until: threading.Event) -> tuple[list[float], int]:
            found, wrong = [], 0
            while not until.is_set():
                began_s = time.perf_counter()
                try:
                    follower.model.adapt(support).predict(query)
                except Exception:  # noqa: BLE001 - whatever it is, it is a failed request
                    wrong += 1
                found.append(time.perf_counter() - began_s)
            return found, wrong

        for turn in range(sizes.swaps):
            number = 1 + turn % 2
            for what, each in turns.items():
                if what == "beside" and turn % 2:
                    continue  # what it tells needs fewer
                if what == "swap":
                    # By another process, as a promotion is: what it reads is not the server's work.
                    other.submit(point, channel.root, number).result()
                over = threading.Event()
                asking = [pool.submit(ask, over) for _ in range(2)]
                began_s = time.perf_counter()
                if what == "swap":
                    while follower.served.number != number:
                        time.sleep(0.01)
                    swap_s.append(time.perf_counter() - began_s)
                elif what == "beside":
                    other.submit(load_whole, folders[number]).result()
                time.sleep(max(0.0, began_s + swap_s[-1] - time.perf_counter()))
                over.set()
                both = [one.result() for one in asking]
                each.append([took_s for found, _ in both for took_s in found])
                failed += sum(wrong for _, wrong in both)
    p99_s = {what: [float(np.percentile(one, 99)) for one in each] for what, each in turns.items()}
    # Turn by turn, and the median of them: a neighbour's busy second is in one of them alone.
    still_s = statistics.median(p99_s["still"])
    ratios = [swap / without for swap, without in zip(p99_s["swap"], p99_s["still"], strict=True)]
    return {
        "swap_p99_ratio": round(statistics.median(p99_s["swap"]) / still_s, 3),
        "swap_p99_quartiles": [round(float(np.percentile(ratios, q)), 3) for q in (25, 75)],
        "beside_p99_ratio": round(statistics.median(p99_s["beside"]) / still_s, 3),
        "p99_ms": round(1e3 * still_s, 2),
        "swap_s": round(statistics.median(swap_s), 2),
        "requests": {what: sum(map(len, each)) for what, each in turns.items()},
        "failed_requests": failed,
    }


def point(channel: Path, number: int) -> None:
    """Have a channel serve a version that it has, as `gmeta channel rollback` does."""
    Channel(channel).rollback(number)


def load_whole(folder: Path) -> None:
    """Load a model as a follower does: to its first computation."""
    _ = gmeta.load(folder).unadapted


def touched(root: Path, sizes: Sizes) -> dict[str, Any]:
    """Bytes of a delta over those of the full model, over the share of rows that changed."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.serving.channel.models import WIDTH, Model

    found: dict[str, Any] = {}
    for form in ("float32", "int8"):
        channel = Channel(root / f"touched-{form}")
        model = Model.of({"item": sizes.table_rows})
        channel.promote(model.write(root / f"base-{form}", form))
        rng = np.random.default_rng(0)
        for share in (0.01, 0.1):
            packed = root / f"packed-{form}-{share}"
            made = model.changed(rng, share).write(root / f"made-{form}-{share}", form)
            version, _ = pack(channel, made, packed, False)
            rows = version.delta.touched["item"] if version.delta else None
            ratio = version.num_bytes / version.full_bytes
            if rows is not None:
                found[f"delta_over_touched_{form}_{share:g}"] = round(
                    ratio / (rows.rows / rows.num_rows), 3
                )
    return {"delta_over_touched": max(found.values()), **found, "width": WIDTH}


if __name__ == "__main__":
    main()
