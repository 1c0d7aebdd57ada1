"""What a refusal says."""

from collections.abc import Callable
from typing import Any

import pytest


def catch_message(
    kind: type[BaseException], call: Callable[..., object], /, *args: Any, **options: Any
) -> str:
    """Return the message of the error of that kind that the call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)
