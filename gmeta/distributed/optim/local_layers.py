"""The layers, and their optimizer's state, that the steps of one group of ranks alone move."""

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from gmeta.distributed.tables.updates import clamp_squares

# The name of the outer momentum beside the state that torch's optimizer keeps of a layer.
OUTER_MOMENTUM = "outer_momentum"
# How much longer than what the groups moved the layers the outer step may be.
LONGEST_OUTER_STEP = 2.0


@final
class LocalLayers:
    """Layers whose movement since `close` is averaged over the groups of ranks."""

    def __init__(
        self, layers: list[nn.Parameter], state: Mapping[Any, dict[str, Any]], momentum: float
    ) -> None:
        self._layers, self._state, self._momentum = layers, state, momentum
        self._before: Tensor | None = None

    def begin(self) -> None:
        """Keep what the layers are before a step, if that is not known."""
        if self._before is None:
            self._before = self._join()

    def close(self) -> tuple[Tensor, Tensor]:
        """Return what the layers were before, flat, and on the host how far they moved."""
        self.begin()
        assert self._before is not None
        now = self._join()
        # Before the first step of all, optimizers have no state: it begins with zeros.
        before = torch.cat([self._before, now.new_zeros(now.numel() - self._before.numel())])
        self._before = now
        return before, (now - before).cpu()

    def settle(self, before: Tensor, mean: Tensor, windows_late: int) -> None:
        """Have what was closed stand where all groups moved it on average, and further by momentum.

        The steps since then stay on top."""
        assert self._before is not None
        since = self._join() - self._before
        base = before + mean.to(before.device)
        if self._momentum:
            self._move_on(base, mean.to(before.device), windows_late)
        self._before = base.clone()
        self._set(base + since)

    def _move_on(self, base: Tensor, mean: Tensor, windows_late: int) -> None:
        num_weights = sum(layer.numel() for layer in self._layers)
        moved = mean[:num_weights]
        kept = [
            self._state[layer].get(OUTER_MOMENTUM, torch.zeros_like(layer))
            for layer in self._layers
        ]
        momentum = self._momentum * torch.cat([one.flatten() for one in kept]) + moved
        # Clipped, as CO2 does (arXiv 2401.16265), and what it adds to the movement itself counts
        # the less the later it is: staler movements are of other weights.
        longest = LONGEST_OUTER_STEP * torch.linalg.vector_norm(moved)
        momentum *= (longest / torch.linalg.vector_norm(momentum).clamp(min=1e-30)).clamp(max=1.0)
        base[:num_weights] += (momentum - moved) / (1 + windows_late)
        parts = momentum.split([layer.numel() for layer in self._layers])
        for layer, part in zip(self._layers, parts, strict=True):
            self._state[layer][OUTER_MOMENTUM] = part.view_as(layer).clone()

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name of the state, tensor) of all that is averaged; layers first, by ""."""
        yield from (("", layer.detach()) for layer in self._layers)
        for layer in self._layers:
            for name, value in sorted(self._state.get(layer, {}).items()):
                # Numbers of steps are equal everywhere.
                if name not in ("step", OUTER_MOMENTUM) and isinstance(value, Tensor):
                    yield name, value

    def _join(self) -> Tensor:
        return torch.cat([value.flatten() for _, value in self._parts()])

    def _set(self, flat: Tensor) -> None:
        parts = list(self._parts())
        values = flat.split([value.numel() for _, value in parts])
        for (name, value), part in zip(parts, values, strict=True):
            value.copy_(clamp_squares(name, part).view_as(value))
