"""The kernels of the fast inner loop, for tests that hold it to a loop over tasks."""

import pytest

from gmeta.adaptation.fused.mlp import AdaptedMlp
from gmeta.adaptation.fused.plain_mlp import PlainMlp


@pytest.fixture(params=["fast", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners made in the test take one kernel, then the other."""
    if request.param == "plain":
        plain: type[AdaptedMlp] = PlainMlp
        monkeypatch.setattr("gmeta.adaptation.fused.fused_loop.MLP_KERNEL", plain)
