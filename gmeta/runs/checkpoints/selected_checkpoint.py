"""Which checkpoint stands for a run, and which config it fits; without TorchRec, for launchers."""

from pathlib import Path
from typing import Any

from gmeta.config.settings import flatten_sections
from gmeta.config.train_config import RunConfig, TrainConfig, config_from_dict
from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.platform.files.local_paths import check_local
from gmeta.runs.checkpoints.progress_file import read_about, read_progress
from gmeta.runs.run_folder import (
    STEP_FOLDER,
    RunFolder,
    checkpoint_name,
    list_checkpoints,
    parse_checkpoint_step,
)


def checkpoint_to_use(folder: Path, run: RunConfig) -> Path | None:
    """Return the checkpoint that stands for a run: its best if it stops early, or the newest."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return None
    if run.early_stop_patience:
        # A run that stops early has trained on past its best validation.
        best = folder / checkpoint_name(read_progress(checkpoints[-1]).best_step)
        # It may be gone: run.keep_best = false.
        if best in checkpoints:
            return best
    return checkpoints[-1]


def named_checkpoint(key: str, named: str) -> tuple[RunFolder, Path]:
    """Return the run and the checkpoint that the config's `key` names; for a run folder, the one
    that stands for it. Raises UserError: there is none."""
    check_local(key, named)
    path = Path(named)
    if STEP_FOLDER.fullmatch(path.name):
        # runs/demo/checkpoints/step-00000400
        folder, found = RunFolder(path.parent.parent), path if path.is_dir() else None
    else:
        folder = RunFolder(path)
        found = checkpoint_to_use(folder.checkpoints, folder.read_config().run)
    if found is None:
        raise UserError(
            f"{key} = {named!r} has no checkpoint: a run folder that has one, or one of "
            "its checkpoints is needed. Correct it, or leave it empty"
        )
    return folder, found


def best_not_kept(run: RunFolder) -> str:
    """Return the line that says that the newest stands for a best that was not kept; else ""."""
    config, checkpoints = run.read_config(), list_checkpoints(run.checkpoints)
    if not (config.run.early_stop_patience and checkpoints):
        return ""
    best_step = read_progress(checkpoints[-1]).best_step
    if not best_step or run.checkpoints / checkpoint_name(best_step) in checkpoints:
        return ""
    why = "" if config.run.keep_best else " (run.keep_best = false)"
    return (
        f"run {run.root}: the checkpoint of the best validation, at step {best_step}, is not kept"
        f"{why}; the newest, of step {parse_checkpoint_step(checkpoints[-1])}, stands for the run"
    )


def check_config(path: Path, config: TrainConfig) -> None:
    """Compare the config's inputs, model, algorithm and loss with a checkpoint's. Raises UserError:
    one differs; GMetaError: this release does not have the checkpoint's."""
    saved = read_about(path).get("config")
    if saved is None:
        return
    try:
        # Through the settings: this release may have more keys, with defaults.
        before = tied_config(config_from_dict(saved, is_saved=True))
    except ConfigError as error:
        raise GMetaError(
            f"checkpoint {path} was trained with what this release does not have ({error}). "
            "Use the release that wrote it"
        ) from error
    was, now = flatten_sections(before), flatten_sections(tied_config(config))
    for key in {**now, **was}:
        if now.get(key) != was.get(key):
            raise UserError(
                f"{key} = {now.get(key)!r}, but checkpoint {path} was trained with "
                f"{was.get(key)!r}, and its weights mean nothing with another. Set it as it was, "
                "or train a new run, which may begin with run.start_from"
            )


def tied_config(config: TrainConfig) -> dict[str, Any]:
    """Return what a checkpoint's weights mean nothing without: inputs, model, inner loop, loss."""
    saved = config.to_json()
    sections = ("support_features", "item_features", "neighbours", "model", "algorithm")
    tied = {section: saved[section] for section in sections}
    del tied["model"]["dropout"]
    of_labels = "loss", "adapt", "entire_space", "standardise", "moments"
    tied["labels"] = {key: saved["labels"][key] for key in of_labels}
    return {**tied, "outer": {key: saved["outer"][key] for key in ("loss", "huber_delta")}}
