"""Which settings are tried where nobody says: around a config's values, by what its data has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gmeta.config.losses import LOSSES
from gmeta.config.train_config import TrainConfig
from gmeta.errors import UserError
from gmeta.metrics.catalogue import predicted_by
from gmeta.tuning.search_space import (
    FORWARD_ONLY,
    UNUSED_KEYS,
    Dimension,
    SearchChoices,
    SearchRange,
    Space,
    make_log_range,
)

RATING_LOSSES = tuple(loss for loss in LOSSES if predicted_by(loss) == "rating")
# Runs shorter than this are also tried three times as long: early stopping ends them in time.
FEW_EPOCHS = 12


@dataclass(frozen=True)
class IdTables:
    """The id tables of a dataset, and column and table of its item, "" without one."""

    names: tuple[str, ...] = ()
    item: str = ""
    item_table: str = ""


def make_default_space(
    config: TrainConfig, labels: tuple[str, ...] = (), tables: IdTables = IdTables()
) -> Space:
    """Return length, rates, widths, regularisation, ids, neighbours, loss and algorithm, around the
    config's values."""
    outer = config.outer
    space = _list_algorithm_keys(config, labels)
    rates = {name: getattr(outer, name) for name in ("dense_lr", "sparse_lr")}
    # Two decades around the config's rates: the outer optimizers may take any scale.
    space += [
        make_log_range(f"outer.{name}", rate / 10, rate * 10)
        for name, rate in rates.items()
        if rate
    ]
    if space:
        if config.run.epochs < FEW_EPOCHS and not config.run.max_steps:
            space += _make_choices(config, "run.epochs", 3 * config.run.epochs)
        space += _make_choices(config, "model.hidden", [64], [256, 128])
        space += _make_choices(config, "model.dropout", 0.0, 0.2)
        space += _list_id_keys(config, tables)
    if outer.loss in RATING_LOSSES:
        space.append(SearchChoices("outer.loss", RATING_LOSSES))
    unused = UNUSED_KEYS.get(config.algorithm.name, ())
    space = [dimension for dimension in space if dimension.key not in unused]
    if not space:
        raise UserError(
            "the default space of this config is empty: all of its rates are 0. Give --space FILE"
        )
    return tuple(space)


def _list_algorithm_keys(config: TrainConfig, labels: tuple[str, ...]) -> list[Dimension]:
    """Return the algorithm, its plain epochs and its inner loop."""
    algorithm, space = config.algorithm, list[Dimension]()
    kinds = config.labels.loss_kinds(config.outer.loss, labels)
    others = ["maml", "metasgd"]
    if len(kinds) == 1 and predicted_by(kinds[0]) != "score" and algorithm.adapt_layers:
        # A closed form needs one label, no ranking loss and a layer that adapts.
        others.append("ridge")
    if algorithm.name not in FORWARD_ONLY:
        if algorithm.inner_lr > 0:
            # At least 0.003 to 1: in it the best inner rate was found on every data set of
            # docs/results.md.
            low, high = min(0.003, algorithm.inner_lr / 3), max(1.0, algorithm.inner_lr * 3)
            space.append(make_log_range("algorithm.inner_lr", low, high))
        most_steps = max(5, algorithm.inner_steps)
        space.append(SearchRange("algorithm.inner_steps", 1, most_steps, False, True))
        priors = {0.0, 3.0, 10.0, algorithm.support_prior}
        space.append(SearchChoices("algorithm.support_prior", tuple(sorted(priors))))
    if algorithm.name in ("maml", "fomaml", "metasgd", "ridge"):
        space += _make_choices(config, "algorithm.name", *others)
    if (epochs := config.run.epochs) > 1:
        plain = {0, epochs // 2, epochs * 3 // 4, algorithm.plain_epochs}
        space.append(SearchChoices("algorithm.plain_epochs", tuple(sorted(plain))))
    return space


def _list_id_keys(config: TrainConfig, tables: IdTables) -> list[Dimension]:
    """Return decay of id tables, which of them the model does not see, and neighbours of items."""
    space: list[Dimension] = []
    decays = config.sharding.exchange == "host" and config.algorithm.train_base
    if decays and config.outer.sparse_lr and tables.names:
        space += _make_choices(config, "outer.sparse_weight_decay", 0.0, 1.0, 8.0)
    # Without statistics of items or support rows a model has little but ids, which metaemb makes.
    is_informed = config.has_support_inputs or bool(config.item_features.columns)
    has_own = isinstance(config.algorithm.adapt_embeddings, tuple)  # names tables that must be seen
    if tables.names and is_informed and not has_own and config.algorithm.name != "metaemb":
        of_item = [tables.item_table] if tables.item_table else []
        space += _make_choices(config, "model.without", [], of_item, [*tables.names])
    if tables.item:
        space += _make_choices(config, "neighbours.column", "", tables.item)
    return space


def _make_choices(config: TrainConfig, key: str, *others: Any) -> Sequence[SearchChoices]:
    """Return the config's own value and those of `others` that differ, the own one alone left out;
    a list is as the config's JSON has it."""
    values = [config.by_key()[key]]
    values += [each for at, each in enumerate(others) if each not in (*values, *others[:at])]
    return [SearchChoices(key, tuple(values))] if len(values) > 1 else []
