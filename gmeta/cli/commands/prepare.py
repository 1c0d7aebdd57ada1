"""`gmeta prepare`."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from gmeta.cli.commands import console as consoles
from gmeta.cli.commands.extend_stream import extend_stream
from gmeta.cli.commands.prepare_spark import prepare_on_spark, refuse_transform
from gmeta.errors import UserError
from metaio.format.atomic_folder import find_unfinished
from metaio.format.dataset import Dataset, open_dataset
from metaio.prepare.engines.local import prepare as prepare_on_one_machine
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import load_schema
from metaio.quantities import format_count
from metaio.recipes.amazon import prepare_amazon
from metaio.recipes.by_time import ByTimeConfig
from metaio.recipes.metaemb import MetaEmbConfig, prepare_metaemb
from metaio.recipes.movielens import MovieLensConfig, prepare_movielens
from metaio.recipes.movielens_100k import prepare_movielens_100k
from metaio.recipes.next_item import prepare_next_item
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from metaio.recipes.synthetic_days import DaysConfig, write_days

DAILY_ROWS = (DaysConfig.min_rows, DaysConfig.max_rows)
# The options that each way of preparing reads, beside --overwrite: others are refused.
OPTIONS = {
    "--recipe synthetic": {"recipe", "tasks", "items", "rows", "seed"},
    "--recipe synthetic-days": {
        *("recipe", "days", "tasks", "items", "rows", "seed", "delay", "drift")
    },
    "--recipe movielens-1m": {"recipe", "validation", "order", "history", "seed"},
    "--recipe metaemb": {"recipe", "validation", "seed"},
    "--recipe movielens-100k": {"recipe", "label", "seed"},
    "--recipe amazon": {"recipe", "label", "seed"},
    "--recipe next-item": {"recipe", "seed"},
    "--schema": {"schema", "memory", "threads", "block_rows", "bundle_tasks", "compact"},
    # Memory and threads are set in Spark's own configuration.
    "--schema --spark": {"schema", "spark", "block_rows", "bundle_tasks", "compact"},
    "--extend": {
        *("extend", "along", "accept", "strict", "begin", "backfill", "label_range", "schema"),
        *("memory", "threads", "block_rows", "bundle_tasks", "compact"),
    },
    "--extend --spark": {
        *("extend", "along", "accept", "strict", "begin", "backfill", "label_range", "schema"),
        *("spark", "block_rows", "bundle_tasks", "compact"),
    },
}
# Why tasks are left out, and what to do.
_LOSSES = {
    "short_tasks": "have fewer rows than min_rows = {min_rows}. Lower it under [episodes]",
    "one_sided_episodes": "lack support or query. Correct [episodes] at, or [membership]",
    "long_tasks": "have more rows than max_rows = {max_rows}. Raise it under [episodes], or set "
    'longer = "episodes"',
}

# Datasets that need no schema file.
Recipe = Literal[
    "movielens-1m",
    "metaemb",
    "movielens-100k",
    "amazon",
    "next-item",
    "synthetic",
    "synthetic-days",
]
Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="[INPUT]... OUT",
        help="raw tables (URL or glob), then the new dataset; with --extend tables alone",
    ),
]
SchemaFile = Annotated[
    Path | None, typer.Option(help="TOML file that says what the columns of INPUT are")
]
RecipeName = Annotated[Recipe | None, typer.Option(help="a ready dataset instead of --schema")]
Tasks = Annotated[int, typer.Option(min=1, help="synthetic: users of the train split, or of a day")]
Days = Annotated[
    int, typer.Option(min=1, help="synthetic-days: logs of so many days, for a stream")
]
Drift = Annotated[
    float, typer.Option(min=0.0, help="synthetic-days: turns of each user's taste a day")
]
Delay = Annotated[
    float, typer.Option(min=0.0, help="synthetic-days: mean hours until a click is reported")
]
Items = Annotated[
    int, typer.Option(min=10, help="synthetic: items, a fifth of them cold, or of a day")
]
RowsOfUser = Annotated[
    tuple[int, int], typer.Option(help="synthetic: least and most rows of a user (a day: 8 16)")
]
Seed = Annotated[int, typer.Option(min=0, help="recipes: seed of every random choice")]
Validation = Annotated[
    bool,
    typer.Option(
        "--validation", help="movielens-1m, metaemb: also carve fit and valid-* out of what is warm"
    ),
]
Order = Annotated[str, typer.Option(help="movielens-1m: shuffle, or time (support is the past)")]
History = Annotated[
    int,
    typer.Option(
        min=0, help="movielens-1m: each rating carries so many movies that its user liked"
    ),
]
Label = Annotated[
    Literal["click", "rating"],
    typer.Option(help="movielens-100k, amazon: click is a rating of 4 or 5, rating 1 to 5"),
]
Memory = Annotated[str, typer.Option(help="schema: most memory to use, such as 2GB")]
Threads = Annotated[int, typer.Option(min=0, help="schema: threads; 0: one a CPU core")]
BlockRows = Annotated[int, typer.Option(min=1, max=2**31 - 1, help="schema: rows of a block")]
BundleTasks = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**31 - 1,
        help="schema: training tasks that are shuffled together, which reads faster; 0: each by "
        "itself; default: 64 from 524,288 rows on, else 0",
        show_default=False,
    ),
]
Compact = Annotated[
    bool, typer.Option("--compact", help="schema: smaller files that take longer to read")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the dataset at OUT")]
OnSpark = Annotated[
    bool, typer.Option("--spark", help="schema, extend: let Spark read and deal the rows")
]
Extend = Annotated[
    str | None,
    typer.Option(
        metavar="STREAM",
        help="append the rows of INPUT to a stream; --schema makes it, or adds inputs to it",
    ),
]
Along = Annotated[
    list[str] | None,
    typer.Option(
        metavar="INPUT",
        help="extend: also these, such as files that came late, unless the rest is refused with "
        "them",
        show_default=False,
    ),
]
Accept = Annotated[
    bool, typer.Option("--accept", help="extend: take rows that the screen would refuse")
]

Strict = Annotated[bool, typer.Option("--strict", help="extend: end at a damaged file or row")]
Begin = Annotated[str, typer.Option(metavar="TIME", help="extend: set the window back to here")]
Backfill = Annotated[
    bool, typer.Option("--backfill", help="extend: rows from before the window, but for known ones")
]
LabelRange = Annotated[
    list[str] | None,
    typer.Option(metavar="LABEL=LEAST:MOST", help="extend: quarantine rows with other labels"),
]


def prepare(
    context: typer.Context,
    paths: Paths,
    schema: SchemaFile = None,
    recipe: RecipeName = None,
    tasks: Tasks = 4_000,
    days: Days = 5,
    drift: Drift = 0.0,
    delay: Delay = 0.0,
    items: Items = 3_000,
    rows: RowsOfUser = (20, 40),
    seed: Seed = 2019,
    validation: Validation = False,
    order: Order = "shuffle",
    history: History = 0,
    label: Label = "click",
    memory: Memory = "2GB",
    threads: Threads = 0,
    block_rows: BlockRows = 65_536,
    bundle_tasks: BundleTasks = None,
    compact: Compact = False,
    overwrite: Overwrite = False,
    spark: OnSpark = False,
    extend: Extend = None,
    along: Along = None,
    accept: Accept = False,
    strict: Strict = False,
    begin: Begin = "",
    backfill: Backfill = False,
    label_range: LabelRange = None,
) -> None:
    """Turn raw tables into a dataset of tasks, each with a support and a query set.

    gmeta prepare --schema clicks.toml 's3://logs/2026-*.parquet' data/clicks

    gmeta prepare --recipe synthetic data/clicks

    gmeta prepare --recipe movielens-1m ml-1m data/ml --validation

    gmeta prepare --extend streams/clicks 'logs/day=2026-11-24/*.parquet'"""
    *inputs, out = paths
    _check_options(context, schema, recipe, spark, extend)
    options = PrepareOptions(
        memory_bytes=_parse_bytes(memory),
        threads=threads or os.cpu_count() or 1,
        block_rows=block_rows,
        bundle_tasks=bundle_tasks,
        compact=compact,
        overwrite=overwrite,
    )
    if extend is not None:
        if overwrite:
            raise UserError(
                "--overwrite has no effect with --extend: increments do not change. Leave it out"
            )
        # With --extend all paths are tables: there is no OUT.
        screening = {"accept": accept, "strict": strict, "begin": begin, "backfill": backfill}
        screening |= {"label_ranges": dict(map(_parse_range, label_range or []))}
        extend_stream(paths, along or [], extend, schema, options, screening, spark)
        return
    if (left := find_unfinished(out)) is not None:
        consoles.make_console(stderr=True).print(
            f"an earlier prepare of {out} was interrupted: starting over, without {left}"
        )
    if recipe == "synthetic-days":
        _expect_inputs(recipe, inputs, 0)
        # A day's rows have another default than a user's.
        rows_source = context.get_parameter_source("rows")
        sizes = (
            rows if rows_source is not None and rows_source.name == "COMMANDLINE" else DAILY_ROWS
        )
        days_config = DaysConfig(days, tasks, items, *sizes, seed, drift, delay_h=delay)
        write_days(out, days_config, overwrite)
        consoles.print_result(days=days, logs=out, schema=f"{out}/schema.toml")
        consoles.make_console(stderr=True).print(
            f"written: {format_count(days, 'day')} of logs below {out}, and {out}/schema.toml  "
            "(run: "
            f"gmeta prepare --schema {out}/schema.toml --extend STREAM {out}/day=.../*.parquet)"
        )
        return
    if recipe == "synthetic":
        _expect_inputs(recipe, inputs, 0)
        config = SyntheticConfig(
            num_tasks=tasks, num_items=items, min_rows=rows[0], max_rows=rows[1], seed=seed
        )
        prepare_synthetic(out, config, overwrite)
    elif recipe == "next-item":
        # A file of users, and one of the items' attributes if there is one.
        _expect_inputs(recipe, inputs[:1], 1)
        _expect_inputs(recipe, inputs[1:], min(len(inputs) - 1, 1))
        prepare_next_item(inputs[0], inputs[1] if inputs[1:] else None, out, seed, overwrite)
    elif recipe is not None:
        _expect_inputs(recipe, inputs, 1)
        by_time = ByTimeConfig(label=label, seed=seed)
        if recipe == "movielens-1m":
            melu = MovieLensConfig(seed=seed, order=order, validation=validation, history=history)
            prepare_movielens(inputs[0], out, melu, overwrite)
        elif recipe == "metaemb":
            metaemb = MetaEmbConfig(seed=seed, validation=validation)
            prepare_metaemb(inputs[0], out, metaemb, overwrite)
        elif recipe == "amazon":
            prepare_amazon(inputs[0], out, by_time, overwrite)
        else:
            prepare_movielens_100k(inputs[0], out, by_time, overwrite)
    elif schema is not None:
        if not inputs:
            raise UserError("only OUT is given. Run: gmeta prepare --schema FILE INPUT... OUT")
        _prepare_tables(inputs, out, schema, options, spark)
    _print_report(out)


def _check_options(
    context: typer.Context,
    schema: Path | None,
    recipe: Recipe | None,
    spark: bool,
    extend: str | None,
) -> None:
    """Raise UserError for options that would have no effect."""
    if recipe is not None and schema is not None:
        raise UserError(
            "both --schema and --recipe are given: a dataset comes of one. Leave one out"
        )
    if recipe is None and schema is None and extend is None:
        raise UserError("neither --schema nor --recipe is given. Pass one of them")
    way = f"--recipe {recipe}" if recipe else "--schema"
    way = way if extend is None else "--extend"
    way += " --spark" if spark and recipe is None and (schema or extend) else ""
    # Whoever gives an option believes that it has an effect.
    for name in context.params:
        source = context.get_parameter_source(name)
        # Defaults were not given.
        if source is None or source.name != "COMMANDLINE" or name in OPTIONS[way]:
            continue
        *others, last = [other for other, used in OPTIONS.items() if name in used] or [""]
        if last:
            known = f"{', '.join(others)} and {last}" if others else last
            raise UserError(
                f"--{name.replace('_', '-')} has no effect with {way}: it is for {known}. Leave it "
                "out"
            )


def _prepare_tables(
    inputs: list[str], out: str, schema: Path, options: PrepareOptions, spark: bool
) -> None:
    known = load_schema(schema)
    if known.stream is not None:
        raise UserError(
            f"{schema} has [stream], which is for increments. Run: gmeta prepare --schema {schema} "
            f"--extend {out} INPUT..., or leave [stream] out"
        )
    if spark:
        refuse_transform(schema, known)
        prepare_on_spark(inputs, out, known, options)
    else:
        with consoles.show_phases() as report_phase:
            prepare_on_one_machine(inputs, out, known, options, report_phase)


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None or float(match.group(1)) <= 0:
        raise UserError(f"--memory is {text!r}; a size such as 512MB or 2GB is needed. Correct it")
    # The letter's place is the power of 1,024. More than an exabyte counts as one.
    power = " KMGT".index(match.group(2).upper() or " ")
    return int(min(float(match.group(1)) * 1024**power, 2.0**60))


def _parse_range(text: str) -> tuple[str, tuple[float, float]]:
    label, _, ends = text.rpartition("=")
    try:
        least, most = map(float, ends.split(":"))
    except ValueError as error:
        raise UserError(
            f"--label-range is {text!r}; LABEL=LEAST:MOST is needed, such as click=0:1. Correct it"
        ) from error
    return label, (least, most)


def _expect_inputs(recipe: Recipe, inputs: list[str], count: int) -> None:
    if len(inputs) != count:
        usage = "PATH OUT" if count else "OUT"
        raise UserError(
            f"--recipe {recipe} was given {len(inputs) + 1} paths, it takes {count + 1}. "
            f"Run: gmeta prepare --recipe {recipe} {usage}"
        )


def _describe_loss(dataset: Dataset) -> str:
    """Return a warning if a schema leaves out most of its tasks; "" if not."""
    manifest = dataset.manifest
    counts = manifest.report.get("dropped", {})
    lost, reason = max((counts.get(reason, 0), reason) for reason in _LOSSES)
    kept = sum(split.num_episodes for split in dataset.splits.values())
    if lost <= kept or manifest.recipe.get("name") != "schema":
        return ""
    what = _LOSSES[reason].format(**manifest.recipe["schema"]["episodes"])
    left = format_count(kept, "episode")
    return f"warning: {format_count(lost, 'task')} left out, {left} left: they {what}"


def _print_report(out: str) -> None:
    console = consoles.make_console(stderr=True)
    # Opened anew: what is printed is what a reader will find.
    dataset = open_dataset(out)
    heads = ("split", "episodes", "rows", "shards", "blocks")
    table = consoles.make_table(f"fingerprint {dataset.fingerprint[:16]}", *heads, text=("split",))
    for name, split in dataset.splits.items():
        counts = (split.num_episodes, split.num_rows, len(split.shards), split.num_blocks)
        table.add_row(name, *(f"{count:,}" for count in counts))
    consoles.show_table(console, table)
    dropped = dataset.manifest.report.get("dropped", {})
    if lost := [f"{count:,} {name.replace('_', ' ')}" for name, count in dropped.items() if count]:
        console.print(f"left out: {', '.join(lost)}")
    if warning := _describe_loss(dataset):
        console.print(warning, style="bold red")
    for name, use in dataset.manifest.report.get("hashed_tables", {}).items():
        if use["values_sharing_a_row_estimated"]:
            console.print(
                f"collisions in table {name}: about {use['values_sharing_a_row_estimated']:,} of "
                f"{use['values_estimated']:,} values share one of {use['rows']:,} rows"
            )
    consoles.print_result(
        dataset=out,
        fingerprint=dataset.fingerprint,
        splits={
            name: {
                "episodes": split.num_episodes,
                "rows": split.num_rows,
                "shards": len(split.shards),
                "blocks": split.num_blocks,
            }
            for name, split in dataset.splits.items()
        },
        report=dataset.manifest.report,
    )
    console.print(f"prepared: {out}  (look inside: gmeta inspect {out})")
