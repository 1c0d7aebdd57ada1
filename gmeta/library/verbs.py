"""The library's functions: each is a command of the same name, with its options as parameters."""

import json
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gmeta.config.train_config import TrainConfig
from gmeta.errors import GMetaError
from gmeta.library.command import run_command, start_command, write_options, write_overrides
from gmeta.library.frames import Log, list_inputs
from gmeta.library.results import (
    Draft,
    EvaluationReport,
    Judgement,
    PreparedData,
    TrainedRun,
    Tuned,
)

if TYPE_CHECKING:
    from gmeta.serving.served_model import ServedModel

Config = str | Path | Mapping[str, Any] | TrainConfig
Overrides = Mapping[str, Any] | None
RunPath = str | Path | TrainedRun
TableFormat = Literal["float32", "float16", "int8"]
# A server loads torch and the model before it answers.
START_S, PAUSE_S = 120.0, 0.1


def init(
    log: Log, out: str | Path, *, task: str = "", label: str = "", time: str = "",
    overwrite: bool = False, show: bool = True,
) -> Draft:  # fmt: skip
    """Write a first schema and config into `out`, from looking at a log, and return both paths.

    `log` is a path, a glob, several of them, or a pandas, polars or Arrow frame."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = list_inputs(log, Path(folder))
        options = write_options(out=out, task=task, label=label, time=time, overwrite=overwrite)
        run_command("init", *inputs, *options, show=show, has_json=False)
    return Draft(Path(out) / "schema.toml", Path(out) / "train.toml")


def prepare(
    log: Log, schema: str | Path, out: str | Path, *, overwrite: bool = False, show: bool = True,
    **options: Any,
) -> PreparedData:  # fmt: skip
    """Turn a log into a dataset of tasks at `out`, and return it.

    `log` is as of `init`; `options` are those of `gmeta prepare --schema`, such as memory="2GB"."""
    with tempfile.TemporaryDirectory() as folder:
        words = write_options(schema=schema, overwrite=overwrite, **options)
        run_command("prepare", *words, *list_inputs(log, Path(folder)), str(out), show=show)
    return PreparedData(Path(out))


def train(
    config: Config, overrides: Overrides = None, *, nproc: int = 1, resume: bool = False,
    show: bool = True,
) -> TrainedRun:  # fmt: skip
    """Train a model on `nproc` ranks, and return the run.

    `config` is a TOML file, nested dicts or a TrainConfig; `overrides` replace single keys, such as
    {"run.dir": "runs/plain", "algorithm.name": "none"}."""
    with _config_file(config) as path:
        words = write_options(nproc_per_node=nproc, resume=resume)
        result = run_command("train", path, *write_overrides(overrides or {}), *words, show=show)
    return TrainedRun(Path(result["run"]))


def evaluate(
    run: RunPath, against: RunPath | Sequence[RunPath] = (), overrides: Overrides = None, *,
    splits: Sequence[str] = (), out: str | Path | None = None, draws: int = 1,
    support_sizes: Sequence[int] = (), trees: bool = True, on: str | Path = "", label: str = "",
    nproc: int = 1, show: bool = True,
) -> EvaluationReport:  # fmt: skip
    """Score a run on unseen tasks before and after adapting, beside runs and baselines.

    Returns the report, whose page lies in RUN/evaluation or in `out`."""
    others = [against] if isinstance(against, str | Path | TrainedRun) else against
    words = write_options(
        against=[_path(one) for one in others],
        split=list(splits),
        out=out,
        draws=draws,
        support_sizes=",".join(map(str, support_sizes)),
        on=on,
        label=label,
        nproc_per_node=nproc,
    )
    words += [] if trees else ["--no-trees"]
    result = run_command(
        "evaluate", _path(run), *write_overrides(overrides or {}), *words, show=show
    )
    page = Path(result["report"])
    return EvaluationReport(page, json.loads((page.parent / "evaluation.json").read_text()))


def tune(
    config: Config, overrides: Overrides = None, *, trials: int = 20, study: str | Path = "",
    with_plain: bool = False, trees: bool = True, resume: bool = False, seed: int = 0,
    parallel: int = 0, show: bool = True,
) -> Tuned:  # fmt: skip
    """Choose settings by short runs scored on the validation split, and return the best config."""
    with _config_file(config) as path:
        words = write_options(
            trials=trials, study=study, with_plain=with_plain, resume=resume, seed=seed,
            parallel=parallel,
        )  # fmt: skip
        words += [] if trees else ["--no-trees"]
        result = run_command("tune", path, *write_overrides(overrides or {}), *words, show=show)
    return Tuned(Path(result["train"]), Path(result["page"]), result)


def export(
    run: RunPath, out: str | Path, *, tables: TableFormat = "float32", step: int | None = None,
    overwrite: bool = False, show: bool = True,
) -> "ServedModel":  # fmt: skip
    """Write a run as a model that adapts and predicts alone into `out`, and return it loaded."""
    from gmeta.serving.model_loader import load

    words = write_options(tables=tables, step=step, overwrite=overwrite)
    run_command("export", _path(run), str(out), *words, show=show)
    return load(out)


def judge(
    candidate: RunPath, channel: str | Path, *, on: str | Path = "", split: str = "gate",
    margin: float | None = None, pool: int = 7, out: str | Path | None = None, show: bool = True,
) -> Judgement:  # fmt: skip
    """Compare a run or export with what a channel serves, on tasks that neither was trained on."""
    words = write_options(champion=channel, on=on, split=split, margin=margin, pool=pool, out=out)
    verdict = run_command("channel", "judge", _path(candidate), *words, show=show)
    return Judgement(verdict["verdict"] == "promote", list(verdict["reasons"]), verdict)


def promote(
    candidate: RunPath, channel: str | Path, *, verdict: str | Path | None = None,
    force: bool = False, tables: TableFormat = "float32", step: int | None = None, keep: int = 0,
    show: bool = True,
) -> int:  # fmt: skip
    """Make a run's model, or an export, the one that a channel serves; return its version."""
    words = write_options(verdict=verdict, force=force, tables=tables, step=step, keep=keep)
    result = run_command("channel", "promote", _path(candidate), str(channel), *words, show=show)
    return int(result["serves"])


@contextmanager
def serve(
    model: str | Path, *, listen: str = "", workers: int = 1, **options: Any
) -> Iterator[str]:
    """Serve an exported model or a channel on this machine, and yield its URL; ends with the block.

    `listen` is HOST:PORT, by default any free port of this machine; `options` are those of
    `gmeta serve`. Without tokens it is open to whoever reaches the address."""
    address = listen or f"127.0.0.1:{_find_free_port()}"
    options.setdefault("insecure", "tokens" not in options)
    words = write_options(listen=address, workers=workers, **options)
    # Its log goes to a file: a pipe that nobody reads would block the server once it is full.
    with (
        tempfile.TemporaryFile("w+") as log,
        start_command(["serve", str(model), *words], log, log) as process,
    ):
        url, until_s = f"http://{address}", time.monotonic() + START_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > until_s:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                raise GMetaError(f"the server of {model} did not start: {last}")
            time.sleep(PAUSE_S)
        yield url


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _find_free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _path(run: RunPath) -> str:
    return str(run.path if isinstance(run, TrainedRun) else run)


@contextmanager
def _config_file(config: Config) -> Iterator[str]:
    """Yield the path of a config, written into a temporary file where it is no path."""
    if isinstance(config, str | Path):
        yield str(config)
        return
    values = config.to_json() if isinstance(config, TrainConfig) else dict(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(values, default=str))
        yield str(path)
