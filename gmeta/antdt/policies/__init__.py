"""Policies by name; a user's own is one function in one file, named in the config."""

import importlib.util
import sys
from pathlib import Path

from gmeta.antdt.policies import dd, nd
from gmeta.antdt.policies.interface import Policy
from gmeta.errors import ConfigError
from gmeta_keys.translate_errors import translate_errors

POLICIES: dict[str, Policy] = {
    "none": lambda snapshot, config: [],
    "nd": nd.decide,
    "dd": dd.decide,
}


def find_policy(name: str) -> Policy:
    """Return the policy of a name or of FILE.py:FUNCTION. Raise ConfigError."""
    if name in POLICIES:
        return POLICIES[name]
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ConfigError(
            f"controller.policy = {name!r} is no policy: choose one of {', '.join(POLICIES)}, or "
            "name your own as FILE.py:FUNCTION"
        )
    if not Path(path).is_file():
        raise ConfigError(
            f"controller.policy names the file {path}, which does not exist. Correct the path"
        )
    spec = importlib.util.spec_from_file_location(f"gmeta_policy_{Path(path).stem}", path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    with translate_errors(
        lambda error: ConfigError(f"the policy file {path} does not load: {error!r}. Mend it")
    ):
        spec.loader.exec_module(module)
    policy_function = getattr(module, function, None)
    if not callable(policy_function):
        raise ConfigError(
            f"the policy file {path} has no function {function!r}. Name one that it has"
        )
    policy: Policy = policy_function
    return policy
