"""The kernels of the fast inner loop, as in tests/adaptation."""

from tests.adaptation.conftest import kernel as kernel
