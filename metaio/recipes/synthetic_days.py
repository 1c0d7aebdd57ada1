"""Synthetic click logs day by day, for streams: users and items come and go, and fashion moves.

Shape suffixes: T tasks, N rows, H longest list or task, D embedding width, A items"""

# As `synthetic`, but each day a tenth of the items and a fifth of the users are new, and each
# genre's log-odds take a step of a random walk: yesterday's model is worse today. With `drift` each
# user's taste turns into another and back through their opposites, from a place of its own: which
# clicks still count, only the order of the user's rows reveals.
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from metaio.errors import DataError, SchemaError
from metaio.format.atomic_folder import open_exclusive_folder, replace_folder
from metaio.format.storage import find_file_system, is_local
from metaio.ragged import Int64, offsets
from metaio.recipes.synthetic import (
    TASTE_SCALE,
    Float,
    SyntheticConfig,
    World,
    draw_tastes,
    make_world,
    sigmoid,
)

FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)
DAYS_FILE = "days.json"
_NEW_ITEMS, _NEW_USERS = 10, 5  # a tenth of a day's items, a fifth of its users
_FASHION_STEP = 0.2
_SECONDS = 86_400
ATTRIBUTED_H = 24  # what a row is not credited with by then it never is
_SLOWNESS = 0.8

SCHEMA = """# Written by gmeta prepare --recipe synthetic-days.
seed = 2019

[task]
column = "user"

[label]
column = "click"
{matures}
[time]
column = "time"

[row_id]
column = "row"

[[single]]
column = "item"
vocabulary = 3

{singles}
[[multi]]
column = "tags"
vocabulary = 1

[[dense]]
column = "price"
log1p = true
standardise = true

[[dense]]
column = "item_age"
log1p = true
standardise = true

[[dense]]
column = "position"
standardise = true

[episodes]
by = "last"
query_rows = 5
min_rows = 8
max_rows = 64

{events}[stream]
gate = 0.1
support = 20
capacity_block = 1024
"""
EVENTS = """# Tastes drift: what was clicked, in its order.
[events]
columns = ["item", "genre", "brand"]
where = "click = 1"
longest = 50

"""
SINGLES = ("genre", "brand", "age", "region", "device", "hour")


@dataclass(frozen=True)
class DaysConfig:
    """Size and seed of the logs."""

    days: int = 5
    users_per_day: int = 4_000
    live_items: int = 3_000
    min_rows: int = 8  # of a user on a day
    max_rows: int = 16
    seed: int = 2019
    drift: float = 0.0  # turns of a user's taste a day
    delay_h: float = 0.0  # mean hours until a click is reported; 0: at once

    def __post_init__(self) -> None:
        if self.days < 1 or self.users_per_day < _NEW_USERS or self.live_items < _NEW_ITEMS:
            raise SchemaError(
                f"{self.days} days of {self.users_per_day} users and {self.live_items} items: at "
                f"least 1 day, {_NEW_USERS} users and {_NEW_ITEMS} items are needed. Raise --days, "
                "--tasks or --items"
            )
        if not 1 <= self.min_rows <= self.max_rows:
            raise SchemaError(
                f"rows {self.min_rows} to {self.max_rows}: 1 <= least <= most is needed. Change "
                "--rows"
            )


def write_days(out: str, config: DaysConfig, overwrite: bool = False) -> None:
    """Write a folder day=DATE of clicks for each day, schema.toml and days.json below `out`."""
    fs, place = find_file_system(out)
    if not is_local(fs):
        raise DataError(f"{out} is a URL; logs are made at a local path. Make them there, and copy")
    target = Path(place)
    if target.exists() and not overwrite:
        raise DataError(f"{out} exists. Choose another place, or pass --overwrite to replace it")
    if target.exists() and not (target / DAYS_FILE).is_file():
        raise DataError(
            f"{out} exists and has no {DAYS_FILE}: it is not what this recipe makes. Choose a "
            "place that does not exist"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    world, fashion_of_days = _world(config)
    with open_exclusive_folder(target.parent / f".{target.name}.partial", out) as folder:
        schema_text, before = [], None
        for day in range(config.days):
            table = day_table(config, world, fashion_of_days[day], day)
            seen = table
            if config.delay_h:
                table = delay_clicks(config, table, day)
                seen = observe_day(table, before, day)
            before = table
            name = f"day={FIRST_DAY + timedelta(day):%Y-%m-%d}"
            (folder / name).mkdir()
            pq.write_table(seen, folder / name / "clicks.parquet")
            (folder / name / "_SUCCESS").touch()  # the partition is closed
            # No model of these rows can have a higher expected AUC than P(click) itself; no schema
            # reads it.
            clicks_N, probability_N = (table[c].to_numpy() for c in ("click", "p_click"))
            best = round(auc(probability_N, clicks_N), 4)
            users, items = (len(table[name].unique()) for name in ("user", "item"))
            schema_text.append({"day": name, "rows": len(table), "users": users, "items": items})
            schema_text[-1]["auc_of_p_click"] = best
        (folder / DAYS_FILE).write_text(json.dumps(schema_text, indent=1))
        singles = "".join(f'[[single]]\ncolumn = "{name}"\nvocabulary = 1\n\n' for name in SINGLES)
        matures = f'matures = "{ATTRIBUTED_H}h"\n' if config.delay_h else ""
        parts = {"singles": singles, "events": EVENTS if config.drift else "", "matures": matures}
        (folder / "schema.toml").write_text(SCHEMA.format(**parts))
        replace_folder(folder, target)


def _world(config: DaysConfig) -> tuple[World, Float]:
    """Return all items of all days, and the log-odds of each genre on each day."""
    new = config.live_items // _NEW_ITEMS
    items = config.live_items + new * (config.days - 1)
    world = make_world(SyntheticConfig(num_items=items, seed=config.seed))
    # Generators from 20 on, since `synthetic` uses 0 to 4.
    rng = np.random.default_rng([config.seed, 20])
    steps = _FASHION_STEP * rng.standard_normal((config.days, int(world.item_genre_A.max()) + 1))
    return world, np.cumsum(steps, axis=0)


def day_table(config: DaysConfig, world: World, fashion: Float, day: int) -> pa.Table:
    """Return the log of a day, in the order of time."""
    # A generator for each day, so that any day can be drawn by itself.
    rng = np.random.default_rng([config.seed, 21, day])
    user_T, born_T = _users(config, day)
    lengths_T = rng.integers(config.min_rows, config.max_rows + 1, len(user_T))
    place_N = np.repeat(np.arange(len(user_T)), lengths_T)
    count = len(place_N)
    new = config.live_items // _NEW_ITEMS
    # The newest items are shown most.
    back_N = (config.live_items * rng.power(0.6, count)).astype(np.int64)
    back_N = np.minimum(back_N, config.live_items - 1)
    # Items are numbered as they come: each day's follow those of the day before.
    newest = config.live_items - 1 + new * day
    item_N = newest - back_N
    traits = {name: _trait(config, user_T, name) for name in ("age", "region", "device")}
    hour_N, position_N = rng.integers(0, 24, count), rng.integers(0, 10, count)
    second_N = day * _SECONDS + hour_N * 3_600 + rng.integers(0, 3_600, count)
    taste_ND = _tastes(config, world, user_T, born_T, day)[place_N]
    if config.drift:
        other_ND = _tastes(config, world, user_T, born_T, day, stream=26)[place_N]
        turns_N = _draw_phases(config, user_T)[place_N] + config.drift * second_N / _SECONDS
        angle_N = 2 * np.pi * turns_N[:, None]
        taste_ND = np.cos(angle_N) * taste_ND + np.sin(angle_N) * other_ND
    logit_N = TASTE_SCALE * np.einsum("nl,nl->n", taste_ND, world.item_latent_AD[item_N])
    logit_N += world.popularity_A[item_N] + fashion[world.item_genre_A[item_N]]
    logit_N += world.age_effect[traits["age"]][place_N] + world.hour_effect[hour_N]
    logit_N += world.device_effect[traits["device"]][place_N] - 0.08 * position_N - 0.5
    probability_N = sigmoid(logit_N)
    tag_lengths_N = world.tag_lengths_A[item_N]
    tags = world.tags_AH[item_N]
    flat = tags[np.arange(tags.shape[1]) < tag_lengths_N[:, None]]
    start = int(FIRST_DAY.timestamp())
    # Days since an item came; those of the first day came in lots, one a day before it.
    item_age_N = day - (item_N - config.live_items + new) // new
    table = pa.table(
        {
            "user": user_T[place_N],
            "time": pa.array((start + second_N) * 10**6, pa.timestamp("us", "UTC")),
            "click": (rng.random(count) < probability_N).astype(np.int8),
            "item": item_N,
            "genre": world.item_genre_A[item_N],
            "brand": world.item_brand_A[item_N],
            **{name: values[place_N] for name, values in traits.items()},
            "hour": hour_N,
            "tags": pa.ListArray.from_arrays(offsets(tag_lengths_N).astype(np.int32), flat),
            "price": world.item_price_A[item_N],
            "item_age": item_age_N,
            "position": position_N,
            "p_click": probability_N,
        }
    )
    table = table.take(pa.array(np.argsort(second_N, kind="stable")))
    return table.add_column(0, "row", pa.array(day * 10**9 + np.arange(count)))


def delay_clicks(config: DaysConfig, table: pa.Table, day: int) -> pa.Table:
    """Return a day's rows with the time at which each click is reported (`reported`, in us), those
    that are later than ATTRIBUTED_H hours made no clicks, and the probability of such a one."""
    # Some genres are slow: what is not reported yet is not missing at random.
    rng = np.random.default_rng([config.seed, 24])
    slowness = np.exp(_SLOWNESS * rng.standard_normal(int(table["genre"].to_numpy().max()) + 1))
    mean_h_N = config.delay_h * slowness[table["genre"].to_numpy()]
    delay_h_N = np.random.default_rng([config.seed, 25, day]).exponential(mean_h_N)
    click_N = table["click"].to_numpy() * (delay_h_N < ATTRIBUTED_H).astype(np.int8)
    chance_N = table["p_click"].to_numpy() * -np.expm1(-ATTRIBUTED_H / mean_h_N)
    reported_N = table["time"].cast(pa.int64()).to_numpy() + (delay_h_N * 3.6e9).astype(np.int64)
    for name, values_N in (("click", click_N), ("p_click", chance_N)):
        table = table.set_column(table.column_names.index(name), name, pa.array(values_N))
    return table.append_column("reported", pa.array(reported_N))


def observe_day(table: pa.Table, before: pa.Table | None, day: int) -> pa.Table:
    """Return the log of a day as its end sees it: its rows, of which later clicks are 0, and again
    those of the day before whose click was reported on this day. `click_at_last` is the truth."""
    stop = int(FIRST_DAY.timestamp() + (day + 1) * _SECONDS) * 10**6
    tables = [table]
    if before is not None:
        late_N = before["reported"].to_numpy() >= stop - _SECONDS * 10**6
        tables.append(before.filter(pa.array(late_N & (before["click"].to_numpy() > 0))))
    both = pa.concat_tables(tables)
    seen_N = both["click"].to_numpy() * (both["reported"].to_numpy() < stop)
    both = both.append_column("click_at_last", both["click"]).drop_columns(["reported"])
    both = both.set_column(both.column_names.index("click"), "click", pa.array(seen_N))
    return both.sort_by([("time", "ascending"), ("row", "ascending")])


def _users(config: DaysConfig, day: int) -> tuple[Int64, Int64]:
    """Return the users of a day and the day on which each came: all new ones, some from before."""
    new = config.users_per_day // _NEW_USERS
    # Users are numbered as they come: all of the first day, then the new ones of each day.
    known = config.users_per_day + new * (day - 1) if day else 0
    if not day:
        return np.arange(config.users_per_day), np.zeros(config.users_per_day, np.int64)
    rng = np.random.default_rng([config.seed, 22, day])
    # Recent users come back most.
    weights = np.linspace(0.5, 1.5, known)
    back = rng.choice(known, config.users_per_day - new, replace=False, p=weights / weights.sum())
    user_T = np.concatenate([np.sort(back), known + np.arange(new)])
    born_T = np.maximum(user_T - config.users_per_day + new, 0) // new
    return user_T, born_T


def _tastes(
    config: DaysConfig, world: World, user_T: Int64, born_T: Int64, day: int, stream: int = 23
) -> npt.NDArray[np.float64]:
    """Return the tastes of users [T, D], which stay as they were when the user came; those of
    another stream of random numbers are other ones."""
    new = config.users_per_day // _NEW_USERS
    taste_TD = np.empty((len(user_T), world.centres.shape[1]))
    for born in range(day + 1):
        own = born_T == born
        if own.any():
            rng = np.random.default_rng([config.seed, stream, born])
            count = new if born else config.users_per_day
            first = config.users_per_day + new * (born - 1) if born else 0
            # Drawn for all users of that day: each keeps the same taste, whichever users return.
            taste_TD[own] = draw_tastes(rng, world, count)[user_T[own] - first]
    return taste_TD


def _trait(config: DaysConfig, user_T: Int64, name: str) -> Int64:
    """Return a property of each user, which no day changes."""
    sizes = {"age": (30, 8), "region": (31, 50), "device": (32, 6)}
    stream, size = sizes[name]
    rng = np.random.default_rng([config.seed, stream])
    values: Int64 = rng.integers(0, size, _count_users(config))
    return values[user_T]


def _draw_phases(config: DaysConfig, user_T: Int64) -> Float:
    """Return how far each user's taste has turned when the log begins, in turns from 0 to 1 [T]."""
    # Were it the same for all, what most users like would turn too, and the date would tell it.
    phases: Float = np.random.default_rng([config.seed, 27]).random(_count_users(config))
    return phases[user_T]


def _count_users(config: DaysConfig) -> int:
    """Return how many users ever come."""
    # What is drawn for all of them at once is the same on every day.
    return config.users_per_day + config.users_per_day // _NEW_USERS * config.days


def auc(score_N: Float, label_N: npt.NDArray[np.integer[np.typing.NBitBase]]) -> float:
    """Return the area under the ROC curve; ties count half."""
    order = np.argsort(score_N, kind="stable")
    _, place_N, counts = np.unique(score_N[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    rank_N = (ends - (counts - 1) / 2.0)[place_N]
    clicks_N = label_N[order] > 0
    num, others = int(clicks_N.sum()), int((~clicks_N).sum())
    if not num or not others:
        return 0.5
    return float((rank_N[clicks_N].sum() - num * (num + 1) / 2) / (num * others))
