"""The config file of monitor and controller: TOML with a [monitor] and a [controller] section."""

from dataclasses import dataclass, field
from pathlib import Path

from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig
from gmeta.config.settings import settings_from_dict
from gmeta.errors import ConfigError
from gmeta_keys import read_toml


@dataclass(frozen=True)
class StragglerConfig:
    """When a worker counts as slow, and what is done about it."""

    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)


def load_straggler_config(path: Path | None) -> StragglerConfig:
    """Return the config at `path`, without one the defaults. Raise ConfigError."""
    # By default workers are watched and left alone.
    if path is None:
        return StragglerConfig()
    config = settings_from_dict(StragglerConfig, read_toml("config", path, ConfigError))
    _check_together(config.monitor)
    return config


def _check_together(monitor: MonitorConfig) -> None:
    """Raise ConfigError for settings that contradict each other."""
    # Allowed one by one, but together they call nobody slow or let nobody recover.
    pairs = (
        ("short_slow", monitor.short_slow, "short_windows", monitor.short_windows),
        ("long_slow", monitor.long_slow, "long_windows", monitor.long_windows),
        ("recovered_ratio", monitor.recovered_ratio, "slow_ratio", monitor.slow_ratio),
    )
    for name, value, most_name, most in pairs:
        if value > most:
            raise ConfigError(
                f"monitor.{name} = {value} is more than monitor.{most_name} = {most}; at most "
                "that much is allowed, or no verdict would hold. Lower the one, or raise the other"
            )
