"""Is adapting worth it? Adapted minus each baseline, with its interval, on eleven data sets.

For each data set: `gmeta prepare`, `gmeta train` of the example's config and of the tuned plain
baseline with several seeds, and `gmeta evaluate` against everything that is simpler: the model as
it is before adapting, plain training, plain training that is fine-tuned at the rate and steps that
validation chose, a bias model, and boosted trees where gmeta[lightgbm] is installed. Commands whose
results lie in --work are not repeated while config and code are the same, so a run that was stopped
goes on.

    python benchmarks/quality.py --data path/to/data --write docs/results.md

--data holds the folders ml-1m, ml-100k, amazon and cold; what is missing is said and left out. Of
the logs in cold `gmeta init` alone makes schema and config. All of it takes two hours and a half on
two cores; --only NAME measures one, and --write leaves the others on
the page as they are. --quick takes a minute: MovieLens-100k where it is there, and small synthetic
logs, with one seed, and 100 tasks that choose rate and steps; the others are left out.

--outside SCRIPT sets one more column beside those of cold: what a script reaches on the same
episodes (_quality_outside.py says what it is given and prints). Where it fails, as for a package
that is not installed, the column is left out with the reason."""

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import duckdb
from _common import REPOSITORY, available_cores, environment, finish, make_parser, positive_int
from _quality_jobs import Job, JobError, Ran, gmeta_processes, run_jobs
from _quality_outside import Values, measure_outside
from _quality_page import Measured, page
from _quality_protocols import (
    FIRST_TRY,
    NO_EVENTS,
    NO_EVENTS_PLAIN,
    PROTOCOLS,
    WITH_EVENTS,
    Protocol,
)
from _quality_tables import counts, figures, rows_of, text_lines

from gmeta.cli.commands.init import begin_with

DATA = REPOSITORY.parent / "shared" / "data"
ALL = (*PROTOCOLS, *FIRST_TRY, *WITH_EVENTS)
NAMES = [protocol.name for protocol in ALL]
# --quick: what fits into a minute of two busy cores.
QUICK = ("movielens-100k", "synthetic")
QUICK_PREPARE = ("--tasks", "1000", "--items", "300")
QUICK_TRAIN = ("run.epochs=1",)
QUICK_EVALUATE = ("evaluation.tuning_tasks=100",)  # of each validation split


def main() -> int:
    """Entry point; returns the exit status."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the raw data sets")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--seeds", type=positive_int, default=3)
    parser.add_argument("--draws", type=positive_int, default=5, help="of support and query rows")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "quality")
    parser.add_argument("--parallel", type=positive_int, default=len(available_cores()))
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables as Markdown")
    parser.add_argument("--outside", type=Path, metavar="SCRIPT", help="one more column of cold")
    options = parser.parse_args()
    names, seeds, draws, work = options.only, options.seeds, options.draws, options.work
    if options.quick:
        names = [name for name in QUICK if name in names] or list(QUICK)
        seeds, draws, work = 1, 1, work.with_name(f"{work.name}-quick")
        shutil.rmtree(work, ignore_errors=True)
    there: list[tuple[Protocol, Path]] = []
    for protocol in ALL:
        raw = options.data / protocol.folder
        if protocol.name in names and protocol.folder and not raw.is_dir():
            print(f"{protocol.title}: left out, {raw} is no folder. Give --data", flush=True)
        elif protocol.name in names:
            there.append((protocol, raw))
    # With one seed an evaluation is one process: two data sets keep two cores busy.
    at_once = max(1, min(len(there), options.parallel)) if options.quick else 1
    measured, parallel = [], options.parallel // at_once
    if at_once > 1:
        # Threads of several commands on the same cores would wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ThreadPoolExecutor(at_once) as pool:
        for one in pool.map(
            lambda each: measure(
                *each, work, seeds, draws, parallel, options.outside, quick=options.quick
            ),
            there,
        ):
            measured.append(one)
            tell(one, quick=options.quick)
    if options.write:
        write_page(options.write, measured, seeds, draws)
    if options.quick:
        left = [protocol.title for protocol in ALL if protocol.name not in QUICK]
        print(f"\nQUICK: without {', '.join(left)}, which take longer than a minute", flush=True)
    data = {each.protocol.name: figures(each.rows) for each in measured}
    told = {"seeds": seeds, "draws": draws, "quick": options.quick}
    finish("quality", {**environment(), **told, "data": data})
    return 0


def measure(
    protocol: Protocol, raw: Path, work: Path, seeds: int, draws: int, parallel: int,
    outside: Path | None = None, *, quick: bool,
) -> Measured:  # fmt: skip
    """Prepare, train and evaluate, `parallel` commands at a time."""
    context = gmeta_processes()
    began = time.perf_counter()
    place = work / protocol.name
    first = prepare(protocol, raw, place, context, quick=quick)
    trainings = [
        train_job(protocol, name, seed, place, quick=quick)
        for seed in range(seeds)
        for name in (*protocol.configs(place), *(() if quick or seed else protocol.others))
    ]
    # As `gmeta init --run` has it, the adapted run of a log begins with the plain one.
    second = [job for job in trainings if protocol.log and job.out.name in ("adapted", NO_EVENTS)]
    trained = run_jobs([job for job in trainings if job not in second], parallel, context)
    trained += run_jobs(second, parallel, context)
    evaluations = [
        evaluate_job(protocol, seed, draws, place, trainings, quick=quick) for seed in range(seeds)
    ]
    evaluated = run_jobs(evaluations, parallel, context)
    paths = [job.out / "evaluation.json" for job in evaluations]
    beside = tell_outside(protocol, outside, place) if outside and protocol.log else {}
    rows = rows_of(paths, protocol.splits, protocol.metrics, tuple(protocol.others), beside)
    elapsed_s = time.perf_counter() - began
    # Of kept results too: what the commands took when they ran, shared among those at a time.
    command_s = first.seconds + sum(ran.seconds for ran in (*trained, *evaluated)) / parallel
    where = max(ran.where for ran in evaluated)  # kept ones are of the same code: Job.stamp
    return Measured(protocol, tuple(rows), max(elapsed_s, command_s), len(paths), where)


def prepare(
    protocol: Protocol, raw: Path, place: Path, context: ForkServerContext, *, quick: bool
) -> Ran:
    """Make the dataset, of a log by what `gmeta init` writes."""
    if not protocol.log:
        return run_jobs([prepare_job(protocol, raw, place / "data", quick=quick)], 1, context)[0]
    place.mkdir(parents=True, exist_ok=True)
    log, made, data = place / "log.csv", place / "made", place / "data"
    if protocol.recipe:
        raw = place / "raw"
        run_jobs([prepare_job(protocol, raw, raw, quick=quick)], 1, context)
    query = protocol.log.format(raw=str(raw).replace("'", "''"))
    duckdb.sql(query).write_csv(str(log))
    kinds = {made: ("--events",) * protocol.events}
    if protocol.events:
        kinds[place / "without-events"] = ()
    jobs = [
        Job(("init", str(log), *protocol.init, *words, "--out", str(out)), out, (log,))
        for out, words in kinds.items()
    ]
    run_jobs(jobs, 1, context)
    schema = made / "schema.toml"
    if protocol.split_by:
        text = re.sub(r"^shares = .*$", protocol.split_by, schema.read_text(), flags=re.MULTILINE)
        schema = place / "schema.toml"
        schema.write_text(text)
    arguments = ("prepare", "--schema", str(schema), str(log), str(data))
    return run_jobs([Job(arguments, data, (place / "made.done", schema))], 1, context)[0]


def tell_outside(protocol: Protocol, script: Path, place: Path) -> Values:
    """What the script reaches; nothing, and a line that says why, where it fails."""
    config = protocol.configs(place)["adapted"]
    try:
        return measure_outside(script, place, config, protocol.splits)
    except (OSError, RuntimeError) as error:
        print(f"{protocol.title}: no column of {script}: {error}", flush=True)
        return {}


def prepare_job(protocol: Protocol, raw: Path, out: Path, *, quick: bool) -> Job:
    """The dataset of a recipe."""
    inputs = [str(raw)] if protocol.folder else []
    sizes = QUICK_PREPARE if quick and not protocol.folder else protocol.prepare
    return Job(("prepare", "--recipe", protocol.recipe, *sizes, *inputs, str(out)), out)


def train_job(protocol: Protocol, name: str, seed: int, place: Path, *, quick: bool) -> Job:
    """A run of one seed, `name` of protocol.configs or of protocol.others, anew of other data."""
    configs = protocol.configs(place)
    config = configs.get(name, configs["adapted"])
    if protocol.events and name not in configs:
        config = place / "without-events" / "train.toml"
    out, read = place / f"seed-{seed}" / name, [config, place / "data.done"]
    overrides = [f"data.path={place / 'data'}", f"run.dir={out}", f"run.seed={seed}"]
    if protocol.log and name == "plain":
        overrides.append("algorithm.name=none")
    elif protocol.log and name != NO_EVENTS_PLAIN:
        plain = NO_EVENTS_PLAIN if name == NO_EVENTS else "plain"
        overrides += begin_with(str(out.with_name(plain)))
        read.append(out.with_name(f"{plain}.done"))
    shorter = QUICK_TRAIN if quick else ()
    overrides += [*protocol.train, *protocol.others.get(name, ()), "run.keep_last=1", *shorter]
    return Job(("train", str(config), *overrides), out, tuple(read))


def evaluate_job(
    protocol: Protocol, seed: int, draws: int, place: Path, trainings: Sequence[Job], *, quick: bool
) -> Job:
    """The evaluation of a seed's adapted run against its others, anew where one of them was."""
    root = place / f"seed-{seed}"
    options = [word for split in protocol.splits for word in ("--split", split)]
    options += ["--draws", str(draws)] if protocol.draws and draws > 1 else []
    out = root / "evaluation"
    mine = [job.out for job in trainings if job.out.parent == root]
    against = [word for run in mine[1:] for word in ("--against", str(run))]
    words = ["evaluate", str(mine[0]), *(QUICK_EVALUATE if quick else ()), *against, *options]
    read = tuple(run.with_name(f"{run.name}.done") for run in mine)
    return Job((*words, "--out", str(out)), out, read)


def tell(one: Measured, *, quick: bool) -> None:
    """Print a data set's rows, and how often adapting is ahead."""
    print(f"\n{one.protocol.title}  ({one.seconds / 60:.1f} min)")
    if quick:
        small = "" if one.protocol.folder else " of a sixteenth of the tasks"
        print(f"QUICK: one seed, one epoch{small}; the intervals do not cover the seed")
    print("\n".join(text_lines(one.rows)), flush=True)
    for lead in one.rows[0].leads:
        told = ", ".join(f"{n} {verdict}" for verdict, n in counts(one.rows, lead.baseline).items())
        print(f"against {lead.baseline}: {told}", flush=True)


def write_page(path: Path, measured: Sequence[Measured], seeds: int, draws: int) -> None:
    """Replace the page, whole or not at all; what was not measured now stays as it was."""
    command = f"python benchmarks/quality.py --data DIR --seeds {seeds} --draws {draws}"
    before = path.read_text() if path.exists() else ""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page(measured, draws, f"{command} --write {path}", before))
    temporary.replace(path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as error:
        sys.exit(f"error: {error}")
