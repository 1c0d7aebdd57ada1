"""The config file of monitor and controller: TOML with a [monitor] and a [controller] section."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig
from gmeta.errors import ConfigError
from gmeta.settings import describe_settings, settings_from_dict


@dataclass(frozen=True)
class StragglerConfig:
    """When a worker counts as slow, and what is done about it."""

    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)


def load_straggler_config(path: Path | None) -> StragglerConfig:
    """Return the config at `path`; without one the defaults: workers are watched and left alone.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not allowed.
    """
    if path is None:
        return StragglerConfig()
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Name a readable file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}. Correct it") from error
    return settings_from_dict(StragglerConfig, raw)


def describe_straggler_config() -> list[tuple[str, str, str]]:
    """Return (key, default, help) of every key: the table in docs/stragglers.md."""
    return describe_settings(StragglerConfig)
