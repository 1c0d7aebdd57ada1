"""A log by days with users and items that come and go, and the files by which it is followed."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DAY = 86_400
SCHEMA = """
[task]
column = "user"
[label]
column = "click"
[time]
column = "at"
[[single]]
column = "item"
vocabulary = 2
[[single]]
column = "slot"
hash = 8
[[dense]]
column = "price"
[episodes]
by = "last"
query_rows = 2
min_rows = 4
[stream]
gate = 0.3
capacity_block = 64
screen_after = 100
"""
TRAIN = """
[data]
path = ""
tasks_per_step = 16
[model]
hidden = [8]
options.bottom = [4]
embedding_dim = 4
[algorithm]
name = "maml"
inner_lr = 0.05
[run]
dir = ""
device = "cpu"
epochs = 1
"""


def write_day(logs: Path, day: int, users: int = 40, flip: bool = False, done: bool = True) -> Path:
    """The clicks of a day; a third of its users and items are new."""
    rng = np.random.default_rng(day)
    user = np.repeat(rng.choice(np.arange(users) + day * users // 3, users, replace=False), 6)
    item = rng.integers(0, 30, user.size) + day * 10
    liked = (item * 7 + user) % 5 < 2
    click = rng.random(user.size) < np.where(liked != flip, 0.8, 0.1)
    at = np.sort(rng.integers(day * DAY, (day + 1) * DAY, user.size))
    table = pa.table(
        {
            "user": user, "item": item, "slot": rng.integers(0, 100, user.size),
            "price": rng.random(user.size), "click": click.astype(np.float32), "at": at,
        }
    )  # fmt: skip
    folder = logs / f"day={day:03d}"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "part-0.parquet")
    if done:
        (folder / "_SUCCESS").touch()
    return folder


def write_loop(root: Path, **judge: object) -> Path:
    """stream.toml, with the schema and the training that it names; logs are in root/logs."""
    (root / "schema.toml").write_text(SCHEMA)
    (root / "train.toml").write_text(TRAIN)
    told = "".join(f"{name} = {value}\n" for name, value in judge.items())
    config = root / "stream.toml"
    config.write_text(
        f'[follow]\ninputs = "{root}/logs/day=*"\nschema = "{root}/schema.toml"\n'
        f'stream = "{root}/stream"\ntrain = "{root}/train.toml"\nruns = "{root}/runs"\n'
        f'channel = "{root}/channel"\nevery_s = 0.1\n[judge]\n{told}'
    )
    return config
