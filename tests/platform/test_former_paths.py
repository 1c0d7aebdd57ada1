import importlib
import re
import sys

import pytest

import gmeta
from gmeta.platform.former_paths import FORMER_PATHS, GONE_IN


@pytest.mark.parametrize("former", [old for old, new in FORMER_PATHS.items() if new])
def test_a_former_path_gives_the_same_objects_and_names_the_new_path(former: str) -> None:
    sys.modules.pop(former, None)
    moved = importlib.import_module(FORMER_PATHS[former])
    with pytest.warns(
        FutureWarning, match=re.escape(f"{former} has moved: import {FORMER_PATHS[former]}")
    ):
        module = importlib.import_module(former)
    assert all(
        getattr(module, name) is value for name, value in vars(moved).items() if name[:2] != "__"
    )


def test_a_path_that_never_was_is_refused_as_python_does() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named .gmeta\.hooks\.nothing."):
        importlib.import_module("gmeta.hooks.nothing")


def test_what_is_deprecated_goes_in_the_release_that_was_named() -> None:
    """docs/release.md: then FORMER_PATHS is emptied, and MOVED and GONE of former_keys.py."""
    now, gone_in = (
        tuple(map(int, version.split(".")[:2])) for version in (gmeta.__version__, GONE_IN)
    )
    assert now < gone_in
