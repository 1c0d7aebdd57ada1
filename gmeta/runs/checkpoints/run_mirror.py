"""A copy of a run at a URL, as an object store's: what a machine goes on from if it has lost its
disk, or never saw the disk of the one before.

A checkpoint is there once its progress file is, which goes up last and holds the checksums of all
others: objects appear whole, and whoever lists the run sees a complete checkpoint or none. One of a
step that is there already goes beside it, as step-00000020.1, and counts once it is complete."""

import logging
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.storage_errors import translate_storage_errors
from gmeta.runs.checkpoints.progress_file import PROGRESS_FILE, TEMPORARY_PREFIX, read_progress
from gmeta.runs.run_folder import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    PLAN_FILE,
    STEP_FOLDER,
    RunFolder,
    checkpoint_name,
    list_checkpoints,
    parse_checkpoint_step,
)
from gmeta_keys.translate_errors import translate_errors
from metaio.format.atomic_folder import remove_folder, upload_file, upload_folder
from metaio.format.storage import find_file_system

_log = logging.getLogger(__name__)
# The config last: with it a fetched folder counts as that of a run.
_DESCRIPTION_FILES = (ENVIRONMENT_FILE, PLAN_FILE, METRICS_FILE, CONFIG_FILE)


# step-00000020, or step-00000020.1 where that step was there before.
_COPY = re.compile(rf"{STEP_FOLDER.pattern}(?:\.(\d+))?")


class _MirroredCheckpoint(NamedTuple):
    """A complete checkpoint there. The greater of two is the newer one."""

    step: int
    attempt: int  # how often the step was put before
    folder: str


class RunMirror:
    """The copy at `url` of the run in the folder `root`; one process works with it."""

    def __init__(self, url: str, root: Path) -> None:
        self._url, self._folder = url, RunFolder(root)
        self._fs, self._root = find_file_system(url)
        self._late: set[str] = set()  # names of checkpoints that have not arrived

    def checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints there, oldest first."""
        # Sorted, so that the attempts of a step stand side by side.
        names = [_checkpoint_name(copy.folder) for copy in self._list_copies()]
        return list(dict.fromkeys(names))

    def upload(self, checkpoint: Path) -> None:
        """Copy a finished checkpoint, and what describes the run; remove checkpoints that the run
        has dropped. If the place cannot be reached, log it: the next checkpoint tries again, and
        `finish` raises."""
        self._late.add(checkpoint.name)
        try:
            self.finish()
        except GMetaError as error:
            _log.warning("%s is not copied yet: %s", ", ".join(sorted(self._late)), error)

    def finish(self) -> None:
        """Copy what has not arrived of the checkpoints that the run keeps, the newest first. Raises
        GMetaError: one does not succeed now."""
        kept = {path.name: path for path in list_checkpoints(self._folder.checkpoints)}
        self._late &= kept.keys()
        # What a process before this one could not bring there.
        self._late |= kept.keys() - self.checkpoints()
        for name in reversed([name for name in kept if name in self._late]):
            with self._translate_errors():
                self._upload_checkpoint(kept[name])
            self._late.remove(name)

    def fetch(self) -> str:
        """Bring the newest checkpoint, the best if it is another, and what describes the run to the
        folder; return the newest's name, "" if there is none. Loading verifies the checksums."""
        copies = {copy.step: copy.folder for copy in self._list_copies()}
        if not copies:
            return ""
        newest = best = max(copies)
        self._download(copies[newest])
        name = checkpoint_name(newest)
        with suppress(GMetaError):  # a damaged one is told of where it is loaded
            best = read_progress(self._folder.checkpoints / name).best_step
        if best != newest and best in copies:
            # What the run does not have is not kept there either.
            self._download(copies[best])
        with self._translate_errors():
            for described in _DESCRIPTION_FILES:
                with suppress(FileNotFoundError):
                    self._fs.get_file(
                        f"{self._root}/{described}", str(self._folder.root / described)
                    )
        return name

    def _download(self, folder: str) -> None:
        """Bring a checkpoint to the run's folder."""
        final = self._folder.checkpoints / _checkpoint_name(folder)
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with self._translate_errors():
            for path in self._fs.ls(f"{self._root}/checkpoints/{folder}", detail=False):
                self._fs.get_file(path, str(temporary / str(path).rpartition("/")[2]))
            if not final.exists():
                temporary.rename(final)

    def _upload_checkpoint(self, checkpoint: Path) -> None:
        newest = {copy.step: copy for copy in self._list_copies()}
        # What is there of this step stays until the new files are: it may be all there is.
        before = newest.get(parse_checkpoint_step(checkpoint))
        name = f"{checkpoint.name}.{before.attempt + 1}" if before else checkpoint.name
        there = f"{self._root}/checkpoints/{name}"
        remove_folder(self._fs, there, PROGRESS_FILE)  # half of one, from an upload that broke off
        upload_folder(self._fs, checkpoint, there, PROGRESS_FILE)
        for described in _DESCRIPTION_FILES:
            if (self._folder.root / described).exists():
                upload_file(self._fs, self._folder.root / described, f"{self._root}/{described}")
        kept = {path.name for path in list_checkpoints(self._folder.checkpoints)}
        older = {copy.folder for copy in newest.values() if copy is not before}
        staying = {folder for folder in (*older, name) if _checkpoint_name(folder) in kept}
        for path in self._fs.ls(f"{self._root}/checkpoints", detail=False):
            folder = str(path).rstrip("/").rpartition("/")[2]
            # Complete or not: an upload or a removal that broke off left the rest.
            if _COPY.fullmatch(folder) and folder not in staying:
                remove_folder(self._fs, f"{self._root}/checkpoints/{folder}", PROGRESS_FILE)

    def _list_copies(self) -> list[_MirroredCheckpoint]:
        """Return what is complete there, oldest first."""
        with self._translate_errors():
            self._fs.invalidate_cache()
            found = self._fs.glob(f"{self._root}/checkpoints/*/{PROGRESS_FILE}")
        matches = [_COPY.fullmatch(str(path).split("/")[-2]) for path in found]
        return sorted(
            _MirroredCheckpoint(int(match[1]), int(match[2] or 0), match[0])
            for match in matches
            if match
        )

    def _translate_errors(self) -> translate_errors:
        what = f"run.mirror = {self._url!r} cannot be reached"
        return translate_storage_errors(what, "Look at the place and the credentials")


def _checkpoint_name(folder: str) -> str:
    """Return the name that a checkpoint has in a run folder."""
    return folder.partition(".")[0]


def fetch_run(url: str, root: Path) -> None:
    """Bring the newest checkpoint and the best from the run's mirror, if it has any, to a folder
    that holds no run yet. One process calls it."""
    if not url or (root / CONFIG_FILE).exists():
        return
    if name := RunMirror(url, root).fetch():
        _log.warning("run.dir = %r holds no run: %s is fetched from %s", str(root), name, url)


def check_new_mirror(url: str, root: Path) -> None:
    """Check that a new run finds no other at its mirror."""
    if url and (names := RunMirror(url, root).checkpoints()):
        raise UserError(
            f"run.mirror = {url!r} holds a run already, up to {names[-1]}: a new run needs a new "
            "place. Choose another, or add --resume to go on from there"
        )
