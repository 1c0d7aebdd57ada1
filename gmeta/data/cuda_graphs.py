"""Forward and backward of a learner as one CUDA graph for each shape of its batches.

What is captured is a pure function of tensors that stay where they are: the embedding rows of a
step, the block of its batch, and the layers. A step copies its rows and its block there, replays
the graph and reads loss and gradients. Exchange, averaging and optimizers stay outside.

Shape suffixes: U unique ids, D embedding width"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from gmeta.data.episodes import Episodes, LearnerInputs
from gmeta.data.transfer import Packed, pack
from gmeta.errors import GMetaError

# A replay is one call, where eager steps spend 5 us a kernel on the host. Batches must be laid out
# in buckets (buckets.py), or hardly a shape would come twice.
_log = logging.getLogger(__name__)

Results = tuple[Tensor | None, ...]
# Records what a function launches; returns what launches it again, and the tensors it fills then.
Capture = Callable[[Callable[[], Results]], tuple[Callable[[], None], Results]]
# Each keeps its inputs on the device: a run with more shapes takes the others eagerly.
MOST_GRAPHS = 32


@final
class CudaCapture:
    """Captures on the current GPU, all graphs in one pool of memory."""

    def __init__(self) -> None:
        # One graph replays at a time, and its results are used before the next.
        self._pool: Any = None

    def __call__(self, work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """Return the graph's replay and its results, which hold nothing before the first replay."""
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls: other threads pin memory, or query NCCL's events, meanwhile.
        with _gc_off(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = work()
        self._pool = graph.pool()
        return graph.replay, results


@contextmanager
def _gc_off() -> Iterator[None]:
    # Garbage is collected now and not inside: freeing a GPU's memory would break the capture.
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _LossSum(nn.Module):
    def __init__(self, learner: nn.Module, loss_sum: Callable[[Tensor, Episodes], Tensor]) -> None:
        super().__init__()
        self.learner = learner
        self.loss_sum = loss_sum

    def forward(self, rows_UD: Tensor, episodes: Episodes) -> Tensor:
        return self.loss_sum(rows_UD, episodes)


@final
class LossGraphs:
    """The graphs of a learner, whose `loss_sum` takes rows and padded episodes on its device."""

    def __init__(
        self, learner: nn.Module, loss_sum: Callable[[Tensor, Episodes], Tensor], capture: Capture
    ) -> None:
        self._module = _LossSum(learner, loss_sum)
        self._capture = capture
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _LossGraph] = {}
        self.replays = 0  # of all graphs

    def loss_sum(self, rows_UD: Tensor, episodes: Episodes) -> Tensor:
        """Return `loss_sum`, differentiable once by rows and layers; eagerly without a graph."""
        if not (episodes.num_fetched and rows_UD.requires_grad and torch.is_grad_enabled()):
            return self._module.loss_sum(rows_UD, episodes)
        inputs = packed_inputs(episodes)
        in_half = torch.is_autocast_enabled(rows_UD.device.type)
        shape = (inputs.layout, episodes.num_fetched), rows_UD.shape[1], rows_UD.dtype, in_half
        graph = self._graphs.get(shape)
        if graph is None:
            self._seen[shape] += 1
            # A shape's first batch runs eagerly, and sets up what a capture must not.
            if self._seen[shape] == 1 or not self._has_room():
                return self._module.loss_sum(rows_UD, episodes)
            graph = self._graphs[shape] = self._capture_graph(rows_UD, episodes, inputs)
        loss: Tensor = _ReplayedLoss.apply(self, graph, inputs.block, rows_UD, *graph.layers)
        return loss

    def _has_room(self) -> bool:
        if len(self._graphs) < MOST_GRAPHS:
            return True
        if len(self._graphs) == MOST_GRAPHS and "told" not in self._seen:
            self._seen["told"] = 1
            _log.warning(
                "run.cuda_graphs: %d shapes have a graph, and batches of more come twice: the "
                "others are taken eagerly",
                MOST_GRAPHS,
            )
        return False

    def _capture_graph(
        self, rows_UD: Tensor, episodes: Episodes, inputs: Packed[LearnerInputs]
    ) -> "_LossGraph":
        # It keeps only what all batches of a shape have in common.
        block = inputs.block.clone()
        static = replace(episodes, held=inputs.layout.of(block), plan=None, fetch=None)
        try:
            return _LossGraph(self._module, rows_UD, block, static, self._capture)
        except RuntimeError as error:
            # Ending a broken-off capture raises an error in the context of the real one.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            raise GMetaError(
                "CUDA cannot capture the step as a graph: "
                f'{str(first).splitlines()[0][:200]}. Set run.cuda_graphs = "off" and --resume'
            ) from error


class _LossGraph:
    def __init__(
        self, module: _LossSum, rows_UD: Tensor, block: Tensor, episodes: Episodes, capture: Capture
    ) -> None:
        # The inputs of `episodes` stand in `block`.
        self.layers = [layer for layer in module.parameters() if layer.requires_grad]
        self._rows_UD = rows_UD.new_zeros(episodes.num_fetched, rows_UD.shape[1])
        self._block = block
        self._replay, (loss, *self._grads) = capture(
            lambda: _loss_and_gradients(module, self._rows_UD, episodes)
        )
        assert loss is not None
        self._loss = loss

    def replay(self, rows_UD: Tensor, block: Tensor) -> Tensor:
        self._rows_UD[: len(rows_UD)].copy_(rows_UD)
        self._block.copy_(block)
        self._replay()
        return self._loss.clone()

    def gradients(self, outer: Tensor, num_rows: int) -> list[Tensor | None]:
        # New tensors, as the next replay overwrites these.
        known = [grad for grad in self._grads if grad is not None]
        multiplied = iter(torch._foreach_mul(known, outer))
        rows_grad, *layers = [None if g is None else next(multiplied) for g in self._grads]
        return [None if rows_grad is None else rows_grad[:num_rows], *layers]


class _ReplayedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graphs: LossGraphs,
        graph: _LossGraph,
        block: Tensor,
        rows_UD: Tensor,
        *layers: Tensor,
    ) -> Tensor:
        loss = graph.replay(rows_UD, block)
        graphs.replays += 1
        ctx.graphs, ctx.graph, ctx.replay = graphs, graph, graphs.replays
        ctx.num_rows = len(rows_UD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        if ctx.replay != ctx.graphs.replays:
            raise RuntimeError(
                f"the gradients of replay {ctx.replay} are gone: replay {ctx.graphs.replays} has "
                "taken their place. Call backward before the next forward"
            )
        return None, None, None, *ctx.graph.gradients(outer[0], ctx.num_rows)


def _loss_and_gradients(module: _LossSum, rows_UD: Tensor, episodes: Episodes) -> Results:
    # Leaves of its own: autograd ties a layer to the stream that first used it, not the capturing
    # one.
    layers = {name: layer.detach() for name, layer in module.named_parameters()}
    wanted = [rows_UD.detach().requires_grad_()]
    for name, layer in module.named_parameters():
        if layer.requires_grad:
            wanted.append(layers[name].requires_grad_())
    with torch.enable_grad():
        loss = functional_call(module, layers, (wanted[0], episodes))
    # Outside of autocast, as a step's own backward is.
    with torch.autocast(rows_UD.device.type, enabled=False):
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return loss.detach(), *grads


def packed_inputs(episodes: Episodes) -> Packed[LearnerInputs]:
    """Return the inputs of the captured function in one block."""
    if isinstance(episodes.held, Packed):
        return episodes.held
    (found,) = pack([episodes.held], pin_memory=False)  # on a CPU they are not
    return found


def graph_key(episodes: Episodes) -> Hashable:
    """Return what batches must have in common to share a graph: shapes, and numbers beside
    tensors."""
    return packed_inputs(episodes).layout, episodes.num_fetched
