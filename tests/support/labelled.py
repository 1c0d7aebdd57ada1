"""A log with three labels, prepared: a click, a purchase among clicks, stars that few rows have."""

from pathlib import Path

import numpy as np

from tests.support.commands import succeed

SCHEMA = """
task = { column = "user" }
label = [
    { column = "click" },
    { column = "bought", name = "buy" },
    { column = "stars", null = "unknown" },
]
[[single]]
column = "item"
hash = 40
[[single]]
column = "shop"
hash = 9
[[dense]]
column = "price"
[episodes]
by = "random"
query_rows = 6
min_rows = 8
max_rows = 20
[splits]
shares = { train = 0.5, valid = 0.25, cold = 0.25 }
"""
TRAIN = """
[data]
path = "{data}"
tasks_per_step = 8
valid_split = "valid"
[model]
name = "dlrm"
embedding_dim = 4
hidden = [8]
options.bottom = [4]
[labels]
loss = {{ stars = "mse" }}
entire_space = {{ buy = "click" }}
judged = "buy"
[algorithm]
inner_lr = 0.1
[run]
dir = "{run}"
epochs = 2
device = "cpu"
checkpoint_every_steps = 4
valid_every_steps = 4
log_every_steps = 1
"""


def write_log(path: Path, num_users: int = 80, seed: int = 0) -> Path:
    """Write the log as CSV: 12 to 17 rows a user, who like some shops more than others."""
    rng = np.random.default_rng(seed)
    lines = ["user,item,shop,price,click,bought,stars"]
    for user in range(num_users):
        taste = rng.normal(size=9)
        for _ in range(rng.integers(12, 18)):
            item = int(rng.integers(0, 40))
            liking = taste[item % 9] + 0.1 * (item - 20)
            click = int(rng.random() < 1 / (1 + np.exp(-liking)))
            bought = int(click and rng.random() < 1 / (1 + np.exp(-taste[item % 4])))
            stars = str(round(min(max(3 + liking, 1), 5))) if rng.random() < 0.4 else ""
            lines.append(f"{user},{item},{item % 9},{rng.random():.3f},{click},{bought},{stars}")
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare(folder: Path) -> Path:
    """Write the log and its dataset; return the training config of a run in `run` there."""
    (folder / "schema.toml").write_text(SCHEMA)
    log = write_log(folder / "log.csv")
    succeed("prepare", "--schema", folder / "schema.toml", log, folder / "data")
    config = folder / "train.toml"
    config.write_text(TRAIN.format(data=folder / "data", run=folder / "run"))
    return config
