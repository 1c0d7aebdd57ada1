"""A CUDA graph that is none: the operations of torch that a function called, called again on the
same tensors, in place. Whatever depended on a value, or on what a step brought elsewhere than into
its static tensors, comes out wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gmeta.data.cuda_graphs import Results


class Tape:
    """Operations with the tensors that they read and filled."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of an operation that was called."""
        self._calls.append((func, args, kwargs, result))

    def replay(self) -> None:
        """Call them again, each result into the memory of the first."""
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                pairs = zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True)
                for there, value in pairs:
                    if there.data_ptr() != value.data_ptr():  # no view, and not in place
                        there.copy_(value)


class Recording(TorchDispatchMode):
    """Inside, a tape takes note of every operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tape.note(func, args, kwargs or {}, result)
        return result


class TapeCapture:
    """Captures on the CPU as a GPU does; `replays` counts those of all tapes."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0

    def __call__(self, work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """Return the replay, and results that are no numbers before the first."""
        tape = Tape()
        with Recording(tape):
            results = work()
        self.tapes.append(tape)
        for result in results:
            if result is not None:
                result.fill_(torch.nan)

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay, results


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
