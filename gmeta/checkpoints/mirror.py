"""A copy of a run at a URL, as an object store's: what a machine goes on from that has lost its
disk, or never saw that of the machine before.

A checkpoint is there once its progress file is, which goes up last and holds the checksums of all
others: objects appear whole, and whoever lists the run sees a complete checkpoint or none.
"""

from __future__ import annotations

import logging
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gmeta.checkpoints.files import PROGRESS_FILE
from gmeta.checkpoints.loader import TEMPORARY_PREFIX
from gmeta.errors import GMetaError, UserError
from gmeta.runs.folder import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    PLAN_FILE,
    STEP_FOLDER,
    RunFolder,
    list_checkpoints,
    step_of,
)
from metaio.format.destination import put_file, put_folder, remove_folder
from metaio.format.storage import file_system

_log = logging.getLogger(__name__)
# The config last: with it a fetched folder counts as that of a run.
_DESCRIBING = (ENVIRONMENT_FILE, PLAN_FILE, METRICS_FILE, CONFIG_FILE)


class Mirror:
    """The copy at `url` of the run in the folder `root`; one process works with it.

    Raises:
        UrlError: no installed package of fsspec reads such URLs.
    """

    def __init__(self, url: str, root: Path) -> None:
        self._url, self._folder = url, RunFolder(root)
        self._fs, self._root = file_system(url)
        self._late: GMetaError | None = None

    def checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints there, oldest first.

        Raises:
            GMetaError: the place cannot be read.
        """
        try:
            self._fs.invalidate_cache()
            found = self._fs.glob(f"{self._root}/checkpoints/*/{PROGRESS_FILE}")
        except OSError as error:
            raise self._unreachable(error) from error
        names = [str(path).split("/")[-2] for path in found]
        return sorted(filter(STEP_FOLDER.fullmatch, names), key=lambda name: step_of(Path(name)))

    def put(self, checkpoint: Path) -> None:
        """Copy a checkpoint that has its name, and what describes the run; remove those that the
        run keeps no longer. A place that cannot be reached is told: the next checkpoint tries
        again, and `finish` insists.
        """
        try:
            self._put(checkpoint)
        except OSError as error:
            self._late = self._unreachable(error)
            _log.warning("%s is not copied yet: %s", checkpoint.name, self._late)
        else:
            self._late = None

    def finish(self) -> None:
        """Copy the newest checkpoint if that has not succeeded.

        Raises:
            GMetaError: it does not succeed now.
        """
        kept = list_checkpoints(self._folder.checkpoints)
        if self._late is not None and kept:
            try:
                self._put(kept[-1])
            except OSError as error:
                raise self._unreachable(error) from error

    def fetch(self) -> str:
        """Bring the newest checkpoint, and what describes the run, to the folder; return its name,
        "" if there is none. Loading verifies the checksums.

        Raises:
            GMetaError: the place cannot be read.
        """
        names = self.checkpoints()
        if not names:
            return ""
        final = self._folder.checkpoints / names[-1]
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            for path in self._fs.ls(f"{self._root}/checkpoints/{names[-1]}", detail=False):
                self._fs.get_file(path, str(temporary / str(path).rpartition("/")[2]))
            if not final.exists():
                temporary.rename(final)
            for name in _DESCRIBING:
                with suppress(FileNotFoundError):
                    self._fs.get_file(f"{self._root}/{name}", str(self._folder.root / name))
        except OSError as error:
            raise self._unreachable(error) from error
        return names[-1]

    def _put(self, checkpoint: Path) -> None:
        there = f"{self._root}/checkpoints/{checkpoint.name}"
        # Of a step that was saved before: its files are others now.
        remove_folder(self._fs, there, PROGRESS_FILE)
        put_folder(self._fs, checkpoint, there, PROGRESS_FILE)
        for name in _DESCRIBING:
            if (self._folder.root / name).exists():
                put_file(self._fs, self._folder.root / name, f"{self._root}/{name}")
        kept = {path.name for path in list_checkpoints(self._folder.checkpoints)}
        for name in self.checkpoints():
            if name not in kept:
                remove_folder(self._fs, f"{self._root}/checkpoints/{name}", PROGRESS_FILE)

    def _unreachable(self, error: OSError) -> GMetaError:
        reason = re.sub(r"\s+", " ", str(error)) or type(error).__name__
        return GMetaError(
            f"run.mirror = {self._url!r} cannot be reached: {reason}. Look at the place and the "
            "credentials"
        )


def fetch_run(url: str, root: Path) -> None:
    """Bring the newest checkpoint from the run's mirror, if it has one, to a folder that holds no
    run yet. One process calls it.

    Raises:
        GMetaError: the place cannot be read.
    """
    if not url or (root / CONFIG_FILE).exists():
        return
    if name := Mirror(url, root).fetch():
        _log.warning("run.dir = %r holds no run: %s is fetched from %s", str(root), name, url)


def check_new_mirror(url: str, root: Path) -> None:
    """Check that a new run finds no other at its mirror.

    Raises:
        UserError: it does. GMetaError: the place cannot be read.
    """
    if url and (names := Mirror(url, root).checkpoints()):
        raise UserError(
            f"run.mirror = {url!r} holds a run already, up to {names[-1]}: a new run needs a new "
            "place. Choose another, or add --resume to go on from there"
        )
