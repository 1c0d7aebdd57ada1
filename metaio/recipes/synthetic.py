"""Click logs with planted task structure, of any size, in bounded memory.

A user u has a hidden taste t_u of 8 numbers: one of 12 cluster centres plus noise. An item i has a
latent vector v_i = g_genre + brand offset + tag offsets + noise. A row is a click with

P(click) = sigmoid(scale * t_u . v_i + popularity_i + age and hour effects + bias).

Shape suffixes: T tasks, N rows, H longest list or task, F single-id or pooled features, M multi-id
features, V values, K dense columns, D embedding width, A items"""

# No visible feature of a user (age, region, device) tells the taste, and no embedding learns it:
# the user id is no feature, and test users are new.
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metaio.errors import SchemaError
from metaio.format.block import Rows
from metaio.format.dataset_writer import Provenance, write_dataset
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.format.layout import DEFAULT_BLOCK_ROWS, usual_bundle_tasks
from metaio.ragged import Int64

Float = npt.NDArray[np.float64]

_LATENT = 8
_CLUSTERS = 12
_GENRES, _BRANDS, _TAGS = 24, 200, 120
_AGES, _REGIONS, _DEVICES, _HOURS = 8, 50, 6, 24
_MAX_TAGS = 4
# Large enough that taste decides most clicks, small enough that clicks stay noisy. On 500 new users
# (tests/metaio/recipes/synthetic_oracle.py): AUC at most 0.650 without adaptation (cold items
# 0.662), 0.830 (0.817) with the exact posterior of 10 to 30 support rows, 0.888 (0.881) with
# P(click) itself.
TASTE_SCALE = 2.0
_TASTE_NOISE = 0.5
# Bounds memory. Chunks are seeded by their first user, so another size draws other logs.
_CHUNK_USERS = 2_000

FEATURES_SINGLE = ("item", "genre", "brand", "price_band", "age", "region", "device", "hour")
FEATURES_DENSE = ("price", "item_age", "popularity", "position")


@dataclass(frozen=True)
class SyntheticConfig:
    """Size and seed of a synthetic dataset."""

    num_tasks: int = 4_000  # users of the train split
    num_items: int = 3_000  # a fifth of them is cold: it stands in the cold-item splits only
    min_rows: int = 20  # rows of a user, support and query
    max_rows: int = 40
    query_rows: int = 10
    seed: int = 2019
    block_rows: int = DEFAULT_BLOCK_ROWS

    def __post_init__(self) -> None:
        if self.num_tasks < 1 or self.num_items < 10:
            raise SchemaError(
                f"{self.num_tasks} tasks and {self.num_items} items: at least 1 task and 10 items "
                "are needed. Raise --tasks or --items"
            )
        if not 1 <= self.query_rows < self.min_rows <= self.max_rows:
            raise SchemaError(
                f"rows {self.min_rows} to {self.max_rows} with {self.query_rows} query rows: "
                "1 <= query < min <= max is needed. Change --rows, which gives least and most"
            )


@dataclass(frozen=True)
class World:
    """Items and taste clusters, drawn from the seed; users are drawn as they are needed."""

    centres: Float
    item_latent_AD: Float
    item_genre_A: Int64
    item_brand_A: Int64
    item_price_A: Float
    item_age_A: Float
    popularity_A: Float
    tag_lengths_A: Int64
    tags_AH: Int64
    age_effect: Float
    device_effect: Float
    hour_effect: Float
    num_warm: int  # items [0, num_warm) are warm


def features(config: SyntheticConfig) -> Features:
    """Return tables and columns of every synthetic dataset; only cold items have row 0."""
    sizes = {"item": config.num_items, "genre": _GENRES, "brand": _BRANDS, "price_band": 10}
    sizes |= {"age": _AGES, "region": _REGIONS, "device": _DEVICES, "hour": _HOURS, "tag": _TAGS}
    return Features(
        tables=tuple(TableSpec(name, size + 1) for name, size in sizes.items()),
        single=tuple(FeatureSpec(name, name) for name in FEATURES_SINGLE),
        multi=(FeatureSpec("tags", "tag"),),
        dense=FEATURES_DENSE,
    )


def make_world(config: SyntheticConfig) -> World:
    """Draw items and clusters."""
    rng = np.random.default_rng([config.seed, 0])
    count = config.num_items
    # Genre carries most of an item's vector, so that a few support rows tell a lot about a user;
    # brand, tags and noise leave something for more rows to find.
    genre_A = rng.integers(0, _GENRES, count)
    brand_A = rng.integers(0, _BRANDS, count)
    tag_lengths_A = rng.integers(0, _MAX_TAGS + 1, count)
    tags_AH = rng.integers(0, _TAGS, (count, _MAX_TAGS))
    latents = (rng.standard_normal((n, _LATENT)) for n in (_GENRES, _BRANDS, _TAGS))
    genre_latent, brand_latent, tag_latent = latents
    has_tag_AH = np.arange(_MAX_TAGS) < tag_lengths_A[:, None]
    tag_part = (tag_latent[tags_AH] * has_tag_AH[..., None]).sum(axis=1)
    tag_part /= np.sqrt(np.maximum(tag_lengths_A, 1))[:, None]
    latent = 0.8 * genre_latent[genre_A] + 0.35 * brand_latent[brand_A] + 0.35 * tag_part
    latent += 0.3 * rng.standard_normal((count, _LATENT))
    return World(
        centres=rng.standard_normal((_CLUSTERS, _LATENT)),
        item_latent_AD=latent / np.linalg.norm(latent, axis=1, keepdims=True),
        item_genre_A=genre_A,
        item_brand_A=brand_A,
        item_price_A=rng.lognormal(3.0, 0.8, count),
        item_age_A=rng.exponential(30.0, count),
        popularity_A=0.5 * rng.standard_normal(count),
        tag_lengths_A=tag_lengths_A,
        tags_AH=tags_AH,
        age_effect=0.25 * rng.standard_normal(_AGES),
        device_effect=0.25 * rng.standard_normal(_DEVICES),
        hour_effect=0.25 * rng.standard_normal(_HOURS),
        num_warm=count - count // 5,
    )


@dataclass(frozen=True)
class _Draw:
    """Rows of some users before they are ids: the item shown, the context, and P(click)."""

    lengths_T: Int64
    user_N: Int64
    item_N: Int64
    hour_N: Int64
    position_N: Int64
    age_T: Int64
    region_T: Int64
    device_T: Int64
    click_probability_N: Float
    visible_logit_N: Float  # what the visible features alone add


def draw_users(
    config: SyntheticConfig, world: World, first_user: int, num_users: int, cold_items: bool
) -> _Draw:
    """Return the rows of users [first_user, first_user + num_users)."""
    # Seeded by the chunk's first user, so that chunks may be drawn in any order.
    rng = np.random.default_rng([config.seed, 1 + cold_items, first_user])
    lengths_T = rng.integers(config.min_rows, config.max_rows + 1, num_users)
    user_N = np.repeat(np.arange(num_users), lengths_T)
    count = len(user_N)
    taste_TD = draw_tastes(rng, world, num_users)
    # Warm and cold items never mix in a split: each group of scores means one thing.
    low, high = (world.num_warm, config.num_items) if cold_items else (0, world.num_warm)
    # Density falls with the item's number: a tenth of the items has a quarter of the rows.
    item_N = low + np.minimum((high - low) * rng.power(0.6, count), high - low - 1).astype(np.int64)
    hour_N, position_N = rng.integers(0, _HOURS, count), rng.integers(0, 10, count)
    age_T, region_T, device_T = (rng.integers(0, n, num_users) for n in (_AGES, _REGIONS, _DEVICES))
    visible_N = (
        world.popularity_A[item_N] + world.age_effect[age_T][user_N] + world.hour_effect[hour_N]
    )
    # Lower positions on a page are clicked less.
    visible_N = visible_N + world.device_effect[device_T][user_N] - 0.08 * position_N - 0.5
    # Row by row: all users times all items would not fit for a large log.
    taste_N = np.einsum("nl,nl->n", taste_TD[user_N], world.item_latent_AD[item_N])
    probability_N = sigmoid(TASTE_SCALE * taste_N + visible_N)
    return _Draw(
        lengths_T,
        user_N,
        item_N,
        hour_N,
        position_N,
        age_T,
        region_T,
        device_T,
        probability_N,
        visible_N,
    )


def _rows(
    config: SyntheticConfig, world: World, first_user: int, num_users: int, cold_items: bool
) -> Rows:
    draw = draw_users(config, world, first_user, num_users, cold_items)
    # Generators 1 and 2 draw users, 3 and 4 the rest of their rows: no stream is used twice.
    rng = np.random.default_rng([config.seed, 3 + cold_items, first_user])
    item_N, user_N = draw.item_N, draw.user_N
    price_N = world.item_price_A[item_N]
    price_band_N = np.clip(np.log(price_N).astype(np.int64) + 3, 0, 9)
    # A training vocabulary does not have the cold items, so all get row 0.
    item_id_N = np.zeros_like(item_N) if cold_items else item_N + 1
    of_item = world.item_genre_A[item_N], world.item_brand_A[item_N], price_band_N
    of_user = (values_T[user_N] for values_T in (draw.age_T, draw.region_T, draw.device_T))
    columns = [item_id_N, *(values_N + 1 for values_N in (*of_item, *of_user, draw.hour_N))]
    popularity_N = world.popularity_A[item_N] + 0.3 * rng.standard_normal(len(item_N))
    age_N = np.log1p(world.item_age_A[item_N]) - 3.0
    dense = [np.log(price_N) - 3.0, age_N, popularity_N, draw.position_N / 10.0]
    tag_lengths_N = world.tag_lengths_A[item_N]
    tags = world.tags_AH[item_N][np.arange(_MAX_TAGS) < tag_lengths_N[:, None]]
    return Rows(
        task_T=np.arange(first_user, first_user + num_users),
        row_lengths_T=draw.lengths_T,
        support_lengths_T=draw.lengths_T - config.query_rows,
        label_N=(rng.random(len(item_N)) < draw.click_probability_N).astype(np.float32),
        dense_NK=np.stack(dense, axis=1).astype(np.float32),
        ids_NF=np.stack(columns, axis=1),
        multi_ids_V=tags + 1,
        multi_lengths_NM=tag_lengths_N[:, None].astype(np.int32),
    )


def split_plan(config: SyntheticConfig) -> dict[str, tuple[int, int, bool]]:
    """Return first user, number of users, and whether the items are cold, of each split."""
    # item-cold has train users and items of no training row; the user-cold splits new users.
    train, tenth = config.num_tasks, max(config.num_tasks // 10, 1)
    return {
        "train": (0, train, False),
        "valid": (train, tenth, False),
        "user-cold": (train + tenth, 2 * tenth, False),
        "item-cold": (0, 2 * tenth, True),
        "user-item-cold": (train + tenth, 2 * tenth, True),
    }


def prepare_synthetic(out: str, config: SyntheticConfig, overwrite: bool = False) -> None:
    """Write a synthetic dataset to the URL `out`."""
    world = make_world(config)
    protocol = "synthetic: the last query_rows of each user's rows are the query set"
    recipe = {"name": "synthetic", **vars(config)}
    provenance = Provenance("user", "click", config.seed, protocol=protocol, recipe=recipe)
    layout = features(config)
    with write_dataset(
        out, layout, provenance, block_rows=config.block_rows, overwrite=overwrite
    ) as writer:
        for name, (first, count, cold_items) in split_plan(config).items():
            # Bundles as gmeta prepare makes them for a log of this size.
            rows = count * (config.min_rows + config.max_rows) // 2
            split = writer.split(name, usual_bundle_tasks(rows) if name == "train" else 0)
            for start in range(first, first + count, _CHUNK_USERS):
                stop = min(start + _CHUNK_USERS, first + count)
                split.write(_rows(config, world, start, stop - start, cold_items))


def sigmoid(logits: Float) -> Float:
    """Return 1 / (1 + exp(-x))."""
    result: Float = 1.0 / (1.0 + np.exp(-logits))
    return result


def draw_tastes(rng: np.random.Generator, world: World, count: int) -> Float:
    """Return the hidden tastes [count, 8] of new users."""
    centres = world.centres[rng.integers(0, _CLUSTERS, count)]
    tastes: Float = centres + _TASTE_NOISE * rng.standard_normal(centres.shape)
    return tastes
