"""A copy of a run at a URL, such as an object store's: another machine can go on from it."""

import logging
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.storage_errors import translate_storage_errors
from gmeta.runs.checkpoints.progress_file import (
    PROGRESS_FILE,
    TEMPORARY_PREFIX,
    read_about,
    read_file_entries,
    read_progress,
)
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
from metaio.format.atomic_folder import download_file, remove_folder, upload_file, upload_folder
from metaio.format.storage import find_file_system

_log = logging.getLogger(__name__)
# The config last: with it a fetched folder counts as a run's.
_DESCRIPTION_FILES = (ENVIRONMENT_FILE, PLAN_FILE, METRICS_FILE, CONFIG_FILE)


# step-00000020, or step-00000020.1 where that step was there before.
_COPY = re.compile(rf"{STEP_FOLDER.pattern}(?:\.(\d+))?")


class _MirroredCheckpoint(NamedTuple):
    """A complete checkpoint there; the greater of two is the newer."""

    step: int
    attempt: int  # earlier uploads of the step
    folder: str


class RunMirror:
    """The copy at `url` of the run in the folder `root`; one process works with it."""

    # A checkpoint counts once its progress file is there, which goes up last and has the checksums
    # of all others: objects appear whole. A second one of a step is step-00000020.1.
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
        """Copy a finished checkpoint and the run's description; remove those the run dropped."""
        self._late.add(checkpoint.name)
        try:
            self.finish()
        # The next checkpoint tries again, and `finish` raises.
        except GMetaError as error:
            _log.warning("%s is not copied yet: %s", ", ".join(sorted(self._late)), error)

    def finish(self) -> None:
        """Copy the run's checkpoints that have not arrived, newest first. Raises GMetaError."""
        kept = {path.name: path for path in list_checkpoints(self._folder.checkpoints)}
        self._late &= kept.keys()
        # Those that an earlier process could not copy, too.
        self._late |= kept.keys() - self.checkpoints()
        for name in reversed([name for name in kept if name in self._late]):
            with self._translate_errors():
                self._upload_checkpoint(kept[name])
            self._late.remove(name)

    def fetch(self) -> str:
        """Bring the newest checkpoint, the best, and the run's description to the folder; return
        the newest's name, "" without one. Loading verifies checksums."""
        copies = {copy.step: copy.folder for copy in self._list_copies()}
        if not copies:
            return ""
        newest = best = max(copies)
        self._download(copies[newest])
        name = checkpoint_name(newest)
        with suppress(GMetaError):  # loading reports a damaged one
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
        final = self._folder.checkpoints / _checkpoint_name(folder)
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with self._translate_errors():
            there = f"{self._root}/checkpoints/{folder}"
            download_file(self._fs, f"{there}/{PROGRESS_FILE}", temporary / PROGRESS_FILE, None)
            sizes: dict[str, int | None] = {}
            with suppress(GMetaError):  # loading reports a damaged one
                entries = read_file_entries(read_about(temporary))
                sizes |= {name: entry.num_bytes for name, entry in entries.items()}
            if not sizes:  # an earlier release listed none
                names = (str(p).rpartition("/")[2] for p in self._fs.ls(there, detail=False))
                sizes = dict.fromkeys(names)
            for name, num_bytes in sizes.items():
                download_file(self._fs, f"{there}/{name}", temporary / name, num_bytes)
            if not final.exists():
                temporary.rename(final)

    def _upload_checkpoint(self, checkpoint: Path) -> None:
        newest = {copy.step: copy for copy in self._list_copies()}
        # The copy of this step stays until the new files are there: it may be all there is.
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
        with self._translate_errors():
            # File systems cache listings, and another process may have written since.
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
    return folder.partition(".")[0]


def fetch_run(url: str, root: Path) -> None:
    """Bring newest and best checkpoint from the run's mirror, if any, to a folder without a run."""
    if not url or (root / CONFIG_FILE).exists():
        return
    if name := RunMirror(url, root).fetch():
        _log.warning("run.dir = %r holds no run: %s is fetched from %s", str(root), name, url)


def check_new_mirror(url: str, root: Path) -> None:
    """Raise UserError unless a new run's mirror is empty."""
    if url and (names := RunMirror(url, root).checkpoints()):
        raise UserError(
            f"run.mirror = {url!r} holds a run already, up to {names[-1]}: a new run needs a new "
            "place. Choose another, or add --resume to go on from there"
        )
