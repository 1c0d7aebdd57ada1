"""Where anything may be raised: somebody's own function, a client of some store, a defect."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import final


@final
class translate_errors:  # noqa: N801 - it reads as a word of the language: with translate_errors(...):
    """Turns whatever is raised inside into an error of ours, with the cause behind it.

    Errors of `passing` say already what is wrong, and pass through; so do those that `told` returns
    unchanged, Ctrl-C and the end of the process.
    """

    def __init__(
        self, translate: Callable[[Exception], Exception], *passing: type[Exception]
    ) -> None:
        self._translate, self._passing = translate, passing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._passing):
            translated = self._translate(error)
            if translated is not error:
                raise translated from error


def format_foreign_error(error: Exception) -> str:
    """Return kind and message, in one line, of an error that was not written for our users."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
