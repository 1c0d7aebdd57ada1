"""CBML: tasks fall into soft clusters, and a gate fits the initial parameters to a task's clusters.

Song et al., "CBML: A Cluster-based Meta-learning Model for Session-based Recommendation", CIKM 2021
(doi 10.1145/3459637.3482239); its clusters and gate have the form of Yao et al., "Hierarchically
Structured Meta-learning", arXiv 1905.05301, with one level of clusters.

Shape suffixes: T tasks, N rows, O outputs, X all inputs side by side"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gmeta_models.gated import GatedModel
from gmeta_models.inputs import RowFeatures
from gmeta_models.mlp import mlp
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.options import CbmlOptions


class ClusterGate(nn.Module):
    """Turns the mean of a task's support rows into a gate for each output of each layer.

    r_t = tanh(V m_t)                                    what the task is like
    p_tc = softmax_c(-|r_t - mu_c|^2 / 2)                how much it is of cluster c
    q_t = sum_c p_tc tanh(U_c r_t)                       what its clusters know
    g_t = 2 sigmoid(W [r_t, q_t])                        near 1 at the start"""

    def __init__(
        self, width: int, task_width: int, clusters: int, outputs: Mapping[str, int]
    ) -> None:
        super().__init__()
        self._outputs = dict(outputs)
        self.encode = nn.Linear(width, task_width)
        self.centres_CZ = nn.Parameter(torch.randn(clusters, task_width))
        self.clusters = nn.Linear(task_width, clusters * task_width)
        self.gates = nn.Linear(2 * task_width, sum(outputs.values()))

    def forward(self, mean_TX: Tensor) -> dict[str, Tensor]:
        """Return the gates of each layer, by name: [T, O]."""
        task_TO = torch.tanh(self.encode(mean_TX))
        # Gaussian kernels of unit variance, as in hierarchically structured meta-learning.
        distance = (task_TO.unsqueeze(1) - self.centres_CZ).square().sum(dim=2)
        share = torch.softmax(-distance / 2, dim=1)
        known = torch.tanh(self.clusters(task_TO)).view(len(mean_TX), *self.centres_CZ.shape)
        cluster_TO = (share.unsqueeze(2) * known).sum(dim=1)
        # Twice the sigmoid: where the last layer gives 0, a gate is 1 and changes nothing.
        gates = 2.0 * torch.sigmoid(self.gates(torch.cat([task_TO, cluster_TO], dim=1)))
        return dict(zip(self._outputs, gates.split([*self._outputs.values()], dim=1), strict=True))


class CBML(GatedModel):
    """Rating (or logit) of every row; its decision layers start from parameters gated by the task.

    Departures from the paper: a task is any task, not a session, and is represented by the mean of
    its support rows' inputs instead of self-attention over clicked items; the gate is a value for
    each output of a layer (its weights and bias) instead of one for each parameter, so that a
    task's change keeps its low rank, and is scaled to 1 at the start. A task without support rows
    has the gates of the mean 0."""

    features_from = 0

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: CbmlOptions) -> None:
        super().__init__()
        self.pooling = config.pooling
        width = sizes.side_by_side(config.embedding_dim)
        outputs = {
            f"decision.{2 * index}": width_out
            for index, width_out in enumerate([*config.hidden, sizes.outputs])
        }
        # The decision layers come last: a model's last linear layer is its head.
        self.gate = ClusterGate(width, config.embedding_dim, options.clusters, outputs)
        self.decision = mlp([width, *config.hidden, sizes.outputs], dropout=config.dropout)

    @property
    def decision_layers(self) -> nn.Sequential:
        """Return the layers that make the outputs."""
        return self.decision

    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """Return the features and dense columns side by side: [N, X]."""
        return rows.side_by_side_NX()

    def gates_TO(self, mean_TX: Tensor) -> dict[str, Tensor]:
        """Return the gates of each task's clusters, by layer: [T, O]."""
        gates: dict[str, Tensor] = self.gate(mean_TX)
        return gates
