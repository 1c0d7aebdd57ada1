"""A task's support rows in one forward pass: a task vector, and from it the scale and shift of each
output of a model's layers.

Row codes, pooled, are a Conditional Neural Process (Garnelo et al., arXiv 1807.01613), which TaNP
(Lin et al., arXiv 2103.06137) brought to cold-start recommendation; scale and shift are FiLM (Perez
et al., arXiv 1709.07871), the scale alone is the gate of POSO (Dai et al., arXiv 2108.04690) and
PEPNet (Chang et al., arXiv 2302.01115).

Shape suffixes: T tasks, N rows, O outputs, X all inputs side by side, J parts of a gate"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gmeta_models.mlp import mlp


class SupportRows(NamedTuple):
    """The labelled rows of all tasks, task by task."""

    features_NX: Tensor
    label_N: Tensor
    error_N: Tensor  # label minus what is predicted of a task without support rows
    lengths_T: Tensor


class SupportEncoder(nn.Module):
    """Turns the support rows of each task into a change of each layer: (W x + b) * scale + shift.

        r_n = MLP([x_n, e_n x_n, y_n, e_n])                 what a row says: features, label, error
        m_t = n_t / (n_t + prior) * sum_n w_n r_n           w_n = 1 / n_t, or softmax_n(v . r_n)
        z_t = tanh(V [m_t, log(1 + n_t)])                   the task vector
        scale_t = 2 sigmoid(A z_t + a), shift_t = B z_t + b

    A task without rows has m_t = 0, and so modulations of its own. Shifting the first layer is the
    same as giving it the task vector as one more input."""

    def __init__(
        self,
        width: int,
        hidden: Sequence[int],
        outputs: Mapping[str, int],
        *,
        attention: bool,
        shifts: bool,
        prior: float,
    ) -> None:
        super().__init__()
        self._outputs = dict(outputs)
        self._prior = prior
        self.rows = mlp([2 * width + 2, *hidden])
        self.attention = nn.Linear(hidden[-1], 1, bias=False) if attention else None
        # One more input than the code has: the number of rows.
        self.task = nn.Linear(hidden[-1] + 1, hidden[-1])
        total = sum(outputs.values())
        self.modulations = nn.Linear(hidden[-1], 2 * total if shifts else total)
        # a and b start at 0, A and B small: a new model is nearly the unmodulated one.
        nn.init.zeros_(self.modulations.bias)

    def forward(self, support: SupportRows) -> dict[str, Tensor]:
        """Return scale and shift of each layer, by name, for every task [T, 2, O], also without
        rows; only the scale, [T, 1, O], if the encoder shifts nothing."""
        features_NX, error_N1 = support.features_NX, support.error_N.unsqueeze(1)
        # e x is the gradient of a linear layer: a taste for a feature shows in it at once.
        known = (features_NX, error_N1 * features_NX, support.label_N.unsqueeze(1), error_N1)
        # Sums over rows are taken in the features' precision, also where autocast is on.
        code_NO = self.rows(torch.cat(known, dim=1)).to(features_NX.dtype)
        count_T1 = support.lengths_T.to(code_NO.dtype).unsqueeze(1)
        # shape, not len(), which a program recorded from this would hold as a constant.
        num_rows = code_NO.shape[0]
        task_N = support.lengths_T.new_zeros(num_rows)
        if num_rows:
            tasks_T = torch.arange(len(support.lengths_T), device=task_N.device)
            task_N = tasks_T.repeat_interleave(support.lengths_T, output_size=num_rows)
        sums_TO = code_NO.new_zeros(len(count_T1), code_NO.shape[1])
        weights_N1 = self._weights_N1(code_NO, count_T1, task_N)
        sums_TO = sums_TO.index_add(0, task_N, code_NO * weights_N1)
        # The weights sum to 1 in a task: this is n / (n + prior), and 0 without rows.
        mean_TO = sums_TO * (count_T1 / (count_T1 + self._prior).clamp(min=1.0))
        task_TO = torch.tanh(self.task(torch.cat([mean_TO, count_T1.log1p()], dim=1)))
        return self._by_layer(self.modulations(task_TO))

    def _weights_N1(self, code_NO: Tensor, count_T1: Tensor, task_N: Tensor) -> Tensor:
        if self.attention is None:
            return (1.0 / count_T1.clamp(min=1.0)).index_select(0, task_N)
        score_N1 = self.attention(code_NO).to(code_NO.dtype)
        # The largest of a task is subtracted, so that exp cannot overflow; it cancels out.
        highest_T1 = score_N1.detach().new_full(count_T1.shape, -torch.inf)
        highest_T1 = highest_T1.scatter_reduce(0, task_N.unsqueeze(1), score_N1.detach(), "amax")
        raised_N1 = (score_N1 - highest_T1.index_select(0, task_N)).exp()
        sums_T1 = raised_N1.new_zeros(count_T1.shape).index_add(0, task_N, raised_N1)
        weights_N1: Tensor = raised_N1 / sums_T1.index_select(0, task_N)
        return weights_N1

    def _by_layer(self, made: Tensor) -> dict[str, Tensor]:
        widths = [*self._outputs.values()]
        scales, *shifts = made.split(sum(widths), dim=1)
        # 2 sigmoid(0) = 1: at the start a layer is scaled by about 1 (POSO).
        both_TJO = torch.stack([2.0 * scales.sigmoid(), *shifts], dim=1)
        return dict(zip(self._outputs, both_TJO.split(widths, dim=2), strict=True))
