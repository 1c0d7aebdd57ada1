"""The folder of a run: config, environment, metrics as JSON lines, TensorBoard, checkpoints."""

import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.config.former_keys import describe_gone_keys
from gmeta.config.train_config import TrainConfig, config_from_dict, digest_of
from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.checked_json import json_object, read_json
from gmeta_keys.path_kinds import RUN_MARK, describe_folder, suggest_path

CONFIG_FILE = RUN_MARK
COST_FILE = "task_cost.json"  # of a checkpoint: what a step, a task and a row took
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
PLAN_FILE = "plan.json"
PREQUENTIAL_FILE = "prequential.json"  # scores of an increment before training on it
STEP_FOLDER = re.compile(r"step-(\d{8,})")  # of a checkpoint that is complete
LOCK_FILE = ".lock"  # while a run is trained


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run folder."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def bad_batches(self) -> Path:
        """Return the folder of the batches that ended a run."""
        return self.root / "bad-batches"

    @property
    def profile(self) -> Path:
        """Return the folder of the profile of some steps."""
        return self.root / "profile"

    @property
    def metrics(self) -> Path:
        """Return the path of the log: one JSON object a logged step."""
        return self.root / METRICS_FILE

    @property
    def plan(self) -> Path:
        """Return the path of the sharding plan: which rank holds which rows of which table."""
        return self.root / PLAN_FILE

    @property
    def tensorboard(self) -> Path:
        """Return the folder of TensorBoard's event files."""
        return self.root / "tensorboard"

    def read_config(self) -> TrainConfig:
        """Return the resolved config of the run. Raises UserError: this is no run folder."""
        return self.read_config_and_digest()[0]

    def read_config_and_digest(self) -> tuple[TrainConfig, str]:
        """Return the config and its digest in checkpoints. Raises UserError: no run folder."""
        saved = self._read_config_json()
        try:
            # The digest of the file as it is, without keys that later releases added.
            return config_from_dict(saved, is_saved=True), digest_of(saved)
        except ConfigError as error:
            raise ConfigError(f"{self.root / CONFIG_FILE}: {error}") from error

    def gone_keys(self, section: str) -> list[str]:
        """Return a line for each key of a section that the run was trained with and that is gone,
        where it would change something."""
        saved = self._read_config_json()
        return describe_gone_keys({section: saved[section]} if section in saved else {})

    def _read_config_json(self) -> dict[str, Any]:
        if other := describe_folder(self.root, RUN_MARK):
            raise UserError(f"{self.root} is no run folder but {other}")
        try:
            return read_json(self.root / CONFIG_FILE)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.root} is no run folder: {CONFIG_FILE} is missing or broken. "
                f"Give the run.dir of a training run{suggest_path(self.root)}"
            ) from error

    def read_environment(self) -> dict[str, Any]:
        """Return the run's `describe_environment`; empty if unknown."""
        try:
            return read_json(self.root / ENVIRONMENT_FILE)
        except (OSError, ValueError):
            return {}

    def trained_on(self) -> str:
        """Return the fingerprint of the run's dataset; "" if unknown."""
        # The file may be damaged: its text goes into messages.
        found = self.read_environment().get("dataset_fingerprint", "")
        return found if isinstance(found, str) and found.isprintable() else ""

    def check_dataset(self, url: str, fingerprint: str) -> None:
        """Raise GMetaError unless the dataset at `url` is known to be the run's."""
        trained_on = self.trained_on()
        if not trained_on:
            raise GMetaError(
                f"run {self.root} does not say which data it was trained on: {ENVIRONMENT_FILE} is "
                "missing or broken. Bring it back from where the run was copied from"
            )
        # In another dataset an id may mean another value.
        if fingerprint != trained_on:
            raise GMetaError(
                f"dataset {url} has fingerprint {fingerprint[:12]}, run {self.root} was trained on "
                f"{trained_on[:12]}: its ids may mean other values. "
                "Bring back that dataset, or train on this one"
            )

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return every logged step, oldest first."""
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text(errors="replace").splitlines():
            # A full disk or a power cut may leave a line half-written.
            with suppress(ValueError):
                found.append(_parse_reading(line))
        return found


def _parse_reading(line: str) -> dict[str, Any]:
    """Return one line of the log. Raises ValueError unless it is one that a run writes."""
    reading = json_object(line)
    # Scores of a split stand in a dict of their own.
    values = [value for name, value in reading.items() if name != "valid"]
    scores = reading.get("valid", {})
    if not isinstance(scores, dict) or not isinstance(reading.get("step"), int):
        raise ValueError("it tells of no step")
    for value in (*values, *scores.values()):
        if value is not None and (
            type(value) not in (int, float) or abs(value) > sys.float_info.max
        ):
            raise ValueError("it holds something other than numbers")
    return reading


def create_run_folder(config: TrainConfig, environment: dict[str, Any]) -> RunFolder:
    """Make the folder and write config and environment. Rank 0 alone calls it."""
    folder = RunFolder(Path(config.run.dir))
    folder.root.mkdir(parents=True, exist_ok=True)
    # The config last: with it the folder counts as that of a run.
    write_json(folder.root / ENVIRONMENT_FILE, environment)
    write_json(folder.root / CONFIG_FILE, config.to_json())
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_atomically(path, json.dumps(value, indent=2).encode())


def truncate_metrics(folder: RunFolder, step: int) -> None:
    """Drop the lines that a resumed run will write again."""
    kept = [line for line in folder.read_metrics() if line["step"] <= step]
    write_atomically(folder.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint folder."""
    return f"step-{step:08d}"


def parse_checkpoint_step(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    # Not by name: step-100000000 would stand before step-99999999.
    return sorted(found, key=parse_checkpoint_step)
