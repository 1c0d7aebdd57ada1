"""Turns errors of foreign code (a user's function, a client of a store) into errors of ours."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import final


@final
class translate_errors:  # noqa: N801 - it reads as a word of the language: with translate_errors(...):
    """Turns any error raised inside into the one that `translate` returns, chained to its cause.
    Errors of the types `passing`, and those that `translate` returns unchanged, pass through."""

    def __init__(
        self, translate: Callable[[Exception], Exception], *passing: type[Exception]
    ) -> None:
        self._translate, self._passing = translate, passing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Exception only: Ctrl-C and SystemExit must still end the process.
        if isinstance(error, Exception) and not isinstance(error, self._passing):
            translated = self._translate(error)
            # Raised anew, the same error would become its own cause.
            if translated is not error:
                raise translated from error


def format_foreign_error(error: Exception) -> str:
    """Return kind and message of an error not written for our users, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
