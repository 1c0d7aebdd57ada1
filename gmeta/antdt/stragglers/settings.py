"""The config file of monitor and controller: TOML with a [monitor] and a [controller] section."""

from dataclasses import dataclass, field
from pathlib import Path

from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig
from gmeta.settings import read_toml, settings_from_dict


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
    return settings_from_dict(StragglerConfig, read_toml("config", path))
