"""The kernel of the fused inner loop and its definition, for tests against a loop over tasks."""

import pytest

from tests.adaptation.fused.plain_mlp import PlainMlp


@pytest.fixture(params=["fast", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners made in the test take the kernel, then its definition."""
    if request.param == "plain":
        monkeypatch.setattr("gmeta.adaptation.fused.fused_loop.AdaptedMlp", PlainMlp)
