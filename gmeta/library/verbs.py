"""The library's functions: each is a command of the same name, with its options as parameters."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gmeta.config.train_config import TrainConfig
from gmeta.library.command import (
    find_error,
    make_error,
    run_command,
    start_command,
    write_options,
    write_settings,
)
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

# Text, or whatever has a path: a Path, a dataset, a run.
Place = str | os.PathLike[str]
Config = Place | Mapping[str, Any] | TrainConfig
Overrides = Mapping[str, Any] | None
TableFormat = Literal["float32", "float16", "int8"]
# A server loads torch and the model before it answers.
START_S, PAUSE_S = 120.0, 0.1


def init(
    log: Log, out: Place, *, task: str = "", label: str = "", time: str = "",
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
    log: Log, schema: Place, out: Place, *, overwrite: bool = False, show: bool = True,
    **options: Any,
) -> PreparedData:  # fmt: skip
    """Turn a log into a dataset of tasks at `out`, and return it.

    `log` is as of `init`; `options` are those of `gmeta prepare --schema`, such as memory="2GB"."""
    with tempfile.TemporaryDirectory() as folder:
        words = write_options(schema=schema, overwrite=overwrite, **options)
        inputs = list_inputs(log, Path(folder))
        result = run_command("prepare", *words, *inputs, os.fspath(out), show=show)
    return PreparedData(Path(out), result["splits"], result["report"])


def train(
    config: Config, overrides: Overrides = None, *, nproc: int = 1, resume: bool = False,
    show: bool = True,
) -> TrainedRun:  # fmt: skip
    """Train a model on `nproc` ranks, and return the run.

    `config` is a TOML file, nested dicts or a TrainConfig; `overrides` replace single keys, such as
    {"run.dir": "runs/plain", "algorithm.name": "none"}. Ctrl-C ends all ranks."""
    with _config_file(config) as path:
        words = write_options(nproc_per_node=nproc, resume=resume)
        result = run_command("train", path, *write_settings(overrides or {}), *words, show=show)
    return TrainedRun(Path(result["run"]))


def evaluate(
    run: Place, against: Place | Sequence[Place] = (), overrides: Overrides = None, *,
    splits: Sequence[str] = (), out: Place | None = None, draws: int = 1,
    support_sizes: Sequence[int] = (), trees: bool = True, on: Place = "", label: str = "",
    nproc: int = 1, show: bool = True,
) -> EvaluationReport:  # fmt: skip
    """Score a run on unseen tasks before and after adapting, beside runs and baselines.

    Returns the report, whose page lies in RUN/evaluation or in `out`."""
    others = [against] if isinstance(against, str | os.PathLike) else against
    words = write_options(
        against=list(others),
        split=list(splits),
        out=out,
        draws=draws,
        support_sizes=",".join(map(str, support_sizes)),
        on=on,
        label=label,
        nproc_per_node=nproc,
        trees=trees,
    )
    result = run_command(
        "evaluate", os.fspath(run), *write_settings(overrides or {}), *words, show=show
    )
    page = Path(result["report"])
    return EvaluationReport(page, json.loads((page.parent / "evaluation.json").read_text()))


def tune(
    config: Config, overrides: Overrides = None, *, trials: int = 20, study: Place = "",
    with_plain: bool = False, trees: bool = True, resume: bool = False, seed: int = 0,
    parallel: int = 0, show: bool = True,
) -> Tuned:  # fmt: skip
    """Choose settings by short runs scored on the validation split, and return the best config."""
    with _config_file(config) as path:
        words = write_options(
            trials=trials, study=study, with_plain=with_plain, resume=resume, seed=seed,
            parallel=parallel, trees=trees,
        )  # fmt: skip
        result = run_command("tune", path, *write_settings(overrides or {}), *words, show=show)
    return Tuned(Path(result["train"]), Path(result["page"]), result)


def export(
    run: Place, out: Place, *, tables: TableFormat = "float32", step: int | None = None,
    overwrite: bool = False, show: bool = True,
) -> "ServedModel":  # fmt: skip
    """Write a run as a model that adapts and predicts alone into `out`, and return it loaded."""
    from gmeta.serving.model_loader import load

    words = write_options(tables=tables, step=step, overwrite=overwrite)
    run_command("export", os.fspath(run), os.fspath(out), *words, show=show)
    return load(Path(out))


def judge(
    candidate: Place, channel: Place, *, on: Place = "", split: str = "gate",
    margin: float | None = None, pool: int = 7, out: Place | None = None, show: bool = True,
) -> Judgement:  # fmt: skip
    """Compare a run or export with what a channel serves, on tasks that neither was trained on."""
    words = write_options(champion=channel, on=on, split=split, margin=margin, pool=pool, out=out)
    verdict = run_command("channel", "judge", os.fspath(candidate), *words, show=show)
    return Judgement(verdict["verdict"] == "promote", list(verdict["reasons"]), verdict)


def promote(
    candidate: Place, channel: Place, *, verdict: Place | None = None,
    force: bool = False, tables: TableFormat = "float32", step: int | None = None, keep: int = 0,
    show: bool = True,
) -> int:  # fmt: skip
    """Make a run's model, or an export, the one that a channel serves; return its version."""
    words = write_options(verdict=verdict, force=force, tables=tables, step=step, keep=keep)
    result = run_command(
        "channel", "promote", os.fspath(candidate), os.fspath(channel), *words, show=show
    )
    return int(result["serves"])


def rollback(channel: Place, *, to: int | None = None, show: bool = True) -> int:
    """Let a channel serve an earlier version again, by default the one before; return which."""
    words = write_options(to=to)
    result = run_command("channel", "rollback", os.fspath(channel), *words, show=show)
    return int(result["serves"])


@contextmanager
def serve(
    model: Place, *, listen: str = "127.0.0.1:0", workers: int = 1, **options: Any
) -> Iterator[str]:
    """Serve an exported model or a channel on this machine, and yield its URL; ends with the block.

    `listen` is HOST:PORT, of which port 0 takes any that is free; `options` are those of
    `gmeta serve`. Without tls_cert or behind_proxy it answers callers of this machine alone."""
    # Its log says when it serves, and where.
    options |= {"log_level": "INFO"}
    protects = ("tls_cert", "tls_key", "tls_client_ca", "tokens", "behind_proxy")
    options.setdefault("insecure", not any(options.get(name) for name in protects))
    words = write_options(listen=listen, workers=workers, **options)
    scheme = "https" if options.get("tls_cert") else "http"
    # Its log goes to a file: a pipe that nobody reads would block the server once it is full.
    with (
        tempfile.TemporaryFile() as log,
        start_command(["serve", os.fspath(model), *words], log, log) as process,
    ):
        until_s, address = time.monotonic() + START_S, ""
        while not address:
            time.sleep(PAUSE_S)
            # Before the log is read, which is complete where the server has ended.
            code = process.poll()
            # Not by seek: the server writes at the place that this file has.
            text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode()
            lines = text.splitlines()
            address = next(filter(None, map(_find_address, lines)), "")
            if not address and (code is not None or time.monotonic() > until_s):
                said = next(filter(None, map(find_error, lines)), "".join(lines[-1:]))
                raise make_error(code or 1, said or f"the server of {model} did not start")
        yield f"{scheme}://{address}"


def _find_address(line: str) -> str:
    """Return where a server listens, of the line of its log that says so; "" of any other."""
    try:
        said = json.loads(line)
    except ValueError:
        return ""
    return str(said["listen"]) if isinstance(said, dict) and said.get("event") == "serving" else ""


@contextmanager
def _config_file(config: Config) -> Iterator[str]:
    """Yield the path of a config, written into a temporary file where it is no path."""
    if isinstance(config, str | os.PathLike):
        yield str(config)
        return
    values = config.to_json() if isinstance(config, TrainConfig) else config
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text("\n".join(write_settings(values)))
        yield str(path)
