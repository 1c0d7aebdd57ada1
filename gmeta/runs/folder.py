"""The folder of a run: resolved config, environment, metrics as JSON lines, TensorBoard,
checkpoints.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.config import TrainConfig, config_from_dict, digest_of
from gmeta.errors import GMetaError, UserError
from gmeta.files.whole import write_whole

CONFIG_FILE = "config.json"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
PLAN_FILE = "plan.json"
STEP_FOLDER = re.compile(r"step-(\d{8,})")  # of a checkpoint that is complete
LOCK_FILE = ".lock"  # while a run is trained


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run folder."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def bad_batches(self) -> Path:
        """Folder of the batches that ended a run."""
        return self.root / "bad-batches"

    @property
    def profile(self) -> Path:
        """Folder of the profile of some steps."""
        return self.root / "profile"

    @property
    def metrics(self) -> Path:
        """One JSON object a logged step."""
        return self.root / METRICS_FILE

    @property
    def plan(self) -> Path:
        """Which rank holds which rows of which table."""
        return self.root / PLAN_FILE

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    def read_config(self) -> TrainConfig:
        """The resolved config that the run was started with.

        Raises:
            UserError: this is no run folder.
        """
        return self.read_config_and_digest()[0]

    def read_config_and_digest(self) -> tuple[TrainConfig, str]:
        """The same, and what the checkpoints of that config say they were written with: of the file
        as it is, to which a later release would add the keys that it has beyond.

        Raises:
            UserError: this is no run folder.
        """
        saved = self._saved_config()
        return config_from_dict(saved), digest_of(saved)

    def _saved_config(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.root / CONFIG_FILE).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.root} is no run folder: {CONFIG_FILE} is missing or broken. "
                "Give the run.dir of a training run"
            ) from error

    def trained_on(self) -> str:
        """The fingerprint of the dataset that the run was trained on; "" if that is not known."""
        try:
            environment = json.loads((self.root / ENVIRONMENT_FILE).read_text())
            return str(environment["dataset_fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def check_dataset(self, url: str, fingerprint: str) -> None:
        """Hold the dataset at `url` against the one that the run was trained on.

        Raises:
            GMetaError: it is another, in which an id may mean another value, or nothing is known.
        """
        trained_on = self.trained_on()
        if not trained_on:
            raise GMetaError(
                f"run {self.root} does not say which data it was trained on: {ENVIRONMENT_FILE} is "
                "missing or broken. Bring it back from where the run was copied from"
            )
        if fingerprint != trained_on:
            raise GMetaError(
                f"dataset {url} has fingerprint {fingerprint[:12]}, run {self.root} was trained on "
                f"{trained_on[:12]}: its ids may mean other values. "
                "Bring back that dataset, or train on this one"
            )

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every logged step, oldest first; empty if none was logged. A line that a full disk or a
        power cut left half-written tells of no step."""
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found


def create_run_folder(config: TrainConfig, environment: dict[str, Any]) -> RunFolder:
    """Make the folder and write what describes the run, of `describe_environment` (rank 0 only)."""
    folder = RunFolder(Path(config.run.dir))
    folder.root.mkdir(parents=True, exist_ok=True)
    # The config last: with it the folder counts as that of a run.
    write_json(folder.root / ENVIRONMENT_FILE, environment)
    write_json(folder.root / CONFIG_FILE, config.to_json())
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all."""
    write_whole(path, json.dumps(value, indent=2).encode())


def keep_metrics_up_to(folder: RunFolder, step: int) -> None:
    """Drop the lines that a resumed run will write again."""
    kept = [line for line in folder.read_metrics() if line["step"] <= step]
    write_whole(folder.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=step_of)  # by name step-100000000 would stand before step-99999999
