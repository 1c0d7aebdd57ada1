"""gmeta itself, on one rank: the sharded learner, optimizers and step of `gmeta train`.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, B tables, U unique ids, D embedding width"""

from collections.abc import Mapping
from functools import cache
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.data.episodes import Episodes
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks, start_ranks
from gmeta.distributed.sharding import shard_learner, table_shards
from gmeta.learner import MetaLearner
from gmeta_models import InputSizes, ModelConfig, build_model
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.read.batch import TaskBatch
from peers.interface import Parameters, Peer
from peers.workload import HIDDEN, WIDTH, Batch, Rates, Workload

LAYERS = {"fc1": "decision.0", "fc2": "decision.2", "linear_out": "decision.4"}
COLLECTIVE_TIMEOUT_S = 300


@final
class Gmeta(Peer):
    """MeLU as shipped: MAML and Adam on the decision layers, fused Adagrad on TorchRec's tables."""

    def build(self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates) -> None:
        self.fields = data.fields
        self.features = features_of(data)
        # A gmeta model sees single-id fields first: fc1's columns follow its order of fields.
        self.columns = np.concatenate(
            [self._columns_of(spec.name) for spec in self.features.sparse]
        )
        sizes = InputSizes(len(self.features.single), len(self.features.multi), 0)
        config = config_of(rates)
        model = build_model(config.model, sizes)
        model.load_state_dict(self._layers_of(init))
        learner = MetaLearner(model, config.algorithm, config.outer.loss)
        self.sharded = shard_learner(learner, self.features, config, only_rank())
        self.optimizer = build_optimizer(self.sharded, config.outer)
        for name, table in table_shards(self.sharded).items():
            (shard,) = table.local_shards()
            field = name.removesuffix(".weight").rpartition(".")[2]
            shard.tensor.copy_(torch.from_numpy(init[f"emb.{field}"]))

    def prepare(self, batch: Batch) -> Episodes:
        # Announced ahead of its step, as `gmeta train` does.
        local = self.sharded.local
        episodes = local.learner.collate(task_batch(batch, self.features))
        return local.exchange.enqueue(episodes)

    def step(self, prepared: Episodes) -> float:
        self.optimizer.begin_step(0, 1)
        loss = self.sharded(prepared, weight=only_rank().world_size / prepared.num_terms)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def gradients(self, prepared: Episodes) -> Parameters:
        # The tables' optimizer is fused into backward, which keeps no gradient: take the rows'.
        unsharded = self.sharded.local
        prepared, fetched_UD = unsharded.fetch(prepared)
        rows_UD = fetched_UD.detach().requires_grad_()
        loss = unsharded.learner(rows_UD, prepared, 1.0 / prepared.num_terms)
        layers = dict(unsharded.learner.model.named_parameters())
        rows_grad_UD, *grads = torch.autograd.grad(loss, [rows_UD, *layers.values()])
        by_layer = {name: grad.numpy() for name, grad in zip(layers, grads, strict=True)}
        found = {
            f"{name}.{kind}": by_layer[f"{LAYERS[name]}.{kind}"]
            for name in LAYERS
            for kind in ("weight", "bias")
        }
        # Back to the order of fields that all peers are compared in.
        found["fc1.weight"] = found["fc1.weight"][:, np.argsort(self.columns)]
        return found | self._dense_tables(prepared, rows_grad_UD.numpy())

    def _columns_of(self, field_name: str) -> NDArray[np.int64]:
        place = [field.name for field in self.fields].index(field_name)
        return np.arange(place * WIDTH, (place + 1) * WIDTH)

    def _layers_of(self, init: Mapping[str, NDArray[np.float32]]) -> dict[str, torch.Tensor]:
        named = {
            f"{layer}.{kind}": torch.from_numpy(init[f"{name}.{kind}"].copy())
            for name, layer in LAYERS.items()
            for kind in ("weight", "bias")
        }
        named["decision.0.weight"] = named["decision.0.weight"][:, self.columns]
        return named

    def _dense_tables(self, batch: Episodes, rows_grad_UD: NDArray[np.float32]) -> Parameters:
        ends_B = np.cumsum(batch.unique_lengths_B.numpy())
        found = {}
        for table, length, end in zip(
            self.features.tables, batch.unique_lengths_B.numpy(), ends_B, strict=True
        ):
            dense = np.zeros((table.num_rows, WIDTH), np.float32)
            dense[batch.unique_ids_U.numpy()[end - length : end]] = rows_grad_UD[end - length : end]
            found[f"emb.{table.name}"] = dense
        return found


@cache
def only_rank() -> Ranks:
    """This process as the only rank; the process group is started once."""
    return start_ranks("cpu", COLLECTIVE_TIMEOUT_S)


def config_of(rates: Rates) -> TrainConfig:
    """MeLU by second-order MAML, as a user would write it."""
    return TrainConfig(
        model=ModelConfig(name="melu", embedding_dim=WIDTH, hidden=(HIDDEN, HIDDEN)),
        algorithm=AlgorithmConfig(
            name="maml",
            inner_steps=1,
            inner_lr=rates.inner,
            adapt_layers=("*",),
            adapt_embeddings=False,
        ),
        outer=OuterConfig(
            loss="mse",
            dense_optimizer="adam",
            dense_lr=rates.outer,
            sparse_optimizer="adagrad",
            sparse_lr=rates.tables,
        ),
    )


def features_of(data: Workload) -> Features:
    """A table a field, under its name."""
    return Features(
        tables=tuple(TableSpec(field.name, field.num_rows) for field in data.fields),
        single=tuple(
            FeatureSpec(field.name, field.name) for field in data.fields if not field.multi
        ),
        multi=tuple(FeatureSpec(field.name, field.name) for field in data.fields if field.multi),
        dense=(),
    )


def task_batch(batch: Batch, features: Features) -> TaskBatch:
    """The batch as Meta-IO hands it over: distinct ids table by table, and positions into them."""
    unique, positions = [], {}
    for table in features.tables:
        distinct, inverse = np.unique(batch.ids[table.name].ids_V, return_inverse=True)
        positions[table.name] = inverse + sum(map(len, unique))
        unique.append(distinct)
    lengths_NM = np.zeros((batch.num_rows, len(features.multi)), np.int64)
    bag_of_value = [np.zeros(0, np.int64)]
    for column, spec in enumerate(features.multi):
        lengths_NM[:, column] = np.diff(batch.ids[spec.name].offsets_N1)
        rows_V = np.repeat(np.arange(batch.num_rows), lengths_NM[:, column])
        bag_of_value.append(rows_V * len(features.multi) + column)
    # A TaskBatch holds multi-id values row by row, and within a row feature by feature.
    order_V = np.argsort(np.concatenate(bag_of_value), kind="stable")
    multi_V = np.concatenate(
        [np.zeros(0, np.int64), *(positions[spec.name] for spec in features.multi)]
    )
    single_NF = np.stack([positions[spec.name] for spec in features.single], axis=1)
    return TaskBatch(
        task_T=torch.arange(batch.num_tasks),
        row_offsets_T1=torch.from_numpy(batch.row_offsets_T1),
        support_lengths_T=torch.from_numpy(batch.support_lengths_T),
        label_N=torch.from_numpy(batch.label_N),
        dense_NK=torch.zeros(batch.num_rows, 0),
        unique_ids_U=torch.from_numpy(np.concatenate(unique)),
        unique_lengths_B=torch.tensor([len(ids) for ids in unique]),
        positions_NF=torch.from_numpy(single_NF.astype(np.int32)),
        multi_positions_V=torch.from_numpy(multi_V[order_V].astype(np.int32)),
        multi_lengths_NM=torch.from_numpy(lengths_NM.astype(np.int32)),
    )


def make() -> Gmeta:
    """The peer."""
    return Gmeta()
