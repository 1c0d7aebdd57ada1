"""Every mutant dies by the method named for it; `make mutants` tries all methods on all mutants.

The unmutated copy passes, so that what kills is the mutation."""

from pathlib import Path

import pytest

from tests.antdt.faults.mutants import METHODS, MUTANTS, Mutant, make_copy, survives


def test_the_unmutated_copy_passes(tmp_path: Path) -> None:
    make_copy(tmp_path, None)
    assert survives(tmp_path, METHODS["behaviours"])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    make_copy(tmp_path, mutant)
    assert not survives(tmp_path, METHODS[mutant.by]), f"the mutant {mutant.name!r} lives"
