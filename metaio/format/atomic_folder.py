"""Makes a folder appear at once or not at all, on a local disk or in an object store.

In a store single files appear at once, folders do not: one file, put last and removed first, says
that the others are there."""

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash

from metaio.errors import DataError
from metaio.format.layout import MANIFEST_NAME
from metaio.format.storage import find_file_system, is_local

# What flock raises on a file system without locks, such as Lustre mounted so: nothing keeps two
# writers out of one place there.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
# Disks write what several threads wait for together: 16 files in a third of the time.
_PARALLEL_FLUSHES = 8
_TRIES = 100  # to lock a file that others remove again and again
_FREE_SPACE = "Free space or choose another place"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EIO: "The disk, or what leads to it, fails: look into the system's log",
}


@contextmanager
def open_destination(out: str, overwrite: bool) -> Iterator[tuple[Path, bool]]:
    """Yield a temporary folder that becomes `out` unless the block fails, and if that is local."""
    fs, root = find_file_system(out)
    local = is_local(fs)
    if local:
        Path(root).parent.mkdir(parents=True, exist_ok=True)
    with open_exclusive_folder(_partial_path(out), root if local else out) as folder:
        # Behind the lock: another writer of the same place may have ended just before.
        find_free_place(out, overwrite)
        yield folder, local
        if local:
            replace_folder(folder, Path(root))
        else:
            # A store cannot rename a folder: the manifest, which goes last, is the commit.
            upload_folder(fs, folder, root, MANIFEST_NAME)


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Wait until these files and folders are on the disk."""
    known = list(paths)
    if len(known) == 1:
        _flush(known[0])
        return
    with ThreadPoolExecutor(_PARALLEL_FLUSHES, thread_name_prefix="metaio-flush") as pool:
        for _ in pool.map(_flush, known):
            pass


def _flush(path: Path) -> None:
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def find_unfinished(out: str) -> Path | None:
    """Return what a killed writer of `out` left, None without; the next writer removes it."""
    partial = _partial_path(out)
    if not partial.exists():
        return None
    with _lock_file(partial).open("a") as lock:
        return partial if _is_locked(lock) else None  # it is being written


def _partial_path(out: str) -> Path:
    """Return where `out` is built."""
    fs, root = find_file_system(out)
    if is_local(fs):
        return Path(root).parent / f".{Path(root).name}.partial"
    # Named by the URL alone, so that a second run finds and removes what a killed one left.
    return Path(tempfile.gettempdir()) / f".metaio-{xxhash.xxh3_64_hexdigest(out.encode())}.partial"


def _lock_file(partial: Path) -> Path:
    # Beside the folder, which is removed while the lock is held.
    return partial.with_suffix(".lock")


def find_free_place(out: str, overwrite: bool) -> tuple[Any, str]:
    """Return file system and path of a dataset; raise DataError where it may not be written."""
    fs, root = find_file_system(out)
    exists = fs.exists(f"{root}/{MANIFEST_NAME}")
    if exists and not overwrite:
        raise DataError(
            f"{out} holds a dataset already. Choose another place, or pass --overwrite to replace "
            "it"
        )
    target = Path(root)
    # A store has no folders: there a manifest alone says that a place is in use.
    is_other = is_local(fs) and not exists and target.exists()
    if is_other and (not target.is_dir() or any(target.iterdir())):
        raise DataError(
            f"{target} exists and is not a dataset. Choose a place that is empty or does not exist"
        )
    return fs, root


@contextmanager
def open_exclusive_folder(partial: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder at `partial`, locked against other writers; remove it afterwards."""
    with lock_writer(_lock_file(partial), name):
        try:
            # What a killed writer left: the lock says that no other process works on it.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "Look at the place and its permissions")
            raise DataError(f"{name} could not be written: {error}. {remedy}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def open_temporary_folder(
    prefix: str = "metaio-passing-", place: str | None = None
) -> Iterator[str]:
    """Yield a folder in `place` (default: the machine's temporary one), removed after the block."""
    # Killed processes leave unpacked logs: the next one removes them, or they would fill the disk.
    for left in Path(place or tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            # A file of another user is not opened: it may be a pipe, which would block.
            of_left = left.lstat()
            if of_left.st_uid != os.getuid() or not stat.S_ISDIR(of_left.st_mode):
                continue
            with _descriptor(left) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if it is at work
                shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place))
    folder = made.with_name(made.name.removeprefix("."))
    with _descriptor(made) as descriptor:
        with suppress(OSError):  # where there are no locks, none is taken away either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        made.rename(folder)  # locked before it has a name that others look for
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the name `target` after the block, if it did not fail."""
    # The caller is alone in this parent folder, so all leftovers are of killed writers.
    for kind in ("partial", "old"):
        for left in target.parent.glob(f".*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        flush_to_disk((*partial.rglob("*"), partial))
        replace_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def lock_writer(
    lock_file: Path, name: str, remedy: str = "Wait for it, or choose another place"
) -> Iterator[None]:
    """Keep other processes out of the block; the lock file is removed afterwards."""
    with _open_locked(lock_file, name, remedy) as lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")  # for who is refused
        lock.flush()
        try:
            yield
        finally:
            # While the lock is held: a process that opened the file meanwhile finds another inode,
            # or none, in _has_its_name.
            lock_file.unlink(missing_ok=True)


def copy_folder(
    folder: Path,
    target: Path,
    copy: Callable[[Path, Path], object] = shutil.copy2,
    names: Iterable[str] | None = None,
) -> None:
    """Copy the files of a folder, or only those of these `names`, to another."""
    # Not shutil.copytree: on a failure it raises a list of texts in place of the error itself.
    for path in _list_files(folder, names):
        there = target / path.relative_to(folder)
        there.parent.mkdir(parents=True, exist_ok=True)
        copy(path, there)


def _list_files(folder: Path, names: Iterable[str] | None) -> list[Path]:
    if names is not None:
        return [folder / name for name in names]
    paths = sorted(folder.rglob("*"))
    # Whoever can write into the folder would have any file of ours copied to others.
    if link := next((path for path in paths if path.is_symlink()), None):
        raise DataError(f"{link} is a link: what it points to would be copied. Remove it")
    return [path for path in paths if path.is_file()]


def upload_folder(
    fs: Any, folder: Path, there: str, last: str, names: Iterable[str] | None = None
) -> None:
    """Copy a local folder, or only its files of these `names`, to the path `there` of an fsspec
    file system, its file `last` last."""
    if is_local(fs):
        with open_atomic_folder(Path(there)) as partial:
            copy_folder(folder, partial, names=names)
        return
    files = _list_files(folder, names)
    # Removed first and put last: a reader that looks for `last` finds the old folder complete,
    # none, or the new folder complete.
    if fs.exists(f"{there}/{last}"):
        fs.rm_file(f"{there}/{last}")
    # The sort is stable and False comes before True, so `last` is put last.
    for path in sorted(files, key=lambda path: path == folder / last):
        fs.put_file(str(path), f"{there}/{path.relative_to(folder).as_posix()}")


def upload_file(fs: Any, path: Path, there: str) -> None:
    """Copy a local file, into a folder that may not exist yet."""
    if is_local(fs):  # object stores have no folders
        fs.makedirs(there.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(path), there)


def download_file(fs: Any, there: str, path: Path, num_bytes: int | None) -> None:
    """Bring a file whose size is listed; of another size it is not brought. Raise DataError."""
    found = None if num_bytes is None else fs.size(there)  # a web server may not say
    if found is not None and found != num_bytes:
        raise DataError(f"{there} has {found:,} bytes, {num_bytes:,} are listed")
    path.parent.mkdir(parents=True, exist_ok=True)
    fs.get_file(there, str(path))


def remove_folder(fs: Any, there: str, last: str) -> None:
    """Remove what `upload_folder` copied, if it is there."""
    with suppress(FileNotFoundError):
        fs.rm_file(f"{there}/{last}")
    with suppress(FileNotFoundError):
        fs.rm(there, recursive=True)


def _open_locked(lock_file: Path, name: str, remedy: str) -> IO[str]:
    """Return the lock file, opened and locked; raise DataError if another process holds it."""
    holder = ""
    for _ in range(_TRIES):
        lock = lock_file.open("a+")
        is_locked = _is_locked(lock)
        # The last holder may have removed the file between our opening and our locking it.
        if is_locked and _has_its_name(lock):
            return lock
        with lock:
            if not is_locked:
                lock.seek(0)
                holder = lock.read()
                break
    raise DataError(f"{holder or 'another process'} is writing {name}. {remedy}")


def _is_locked(lock: IO[str]) -> bool:
    """Lock a file; return False if another process holds the lock."""
    try:
        # The lock dies with its process, so a killed prepare never blocks the next one.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    return True


def _has_its_name(lock: IO[str]) -> bool:
    try:
        return os.fstat(lock.fileno()).st_ino == os.stat(lock.name).st_ino
    except FileNotFoundError:
        return False


def replace_folder(partial: Path, target: Path) -> None:
    """Rename a folder, whose files are on the disk, to `target`, replacing what has that name."""
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    # Rename is the commit. A crash before it leaves the old dataset, or for a moment none.
    partial.rename(target)
    # The rename itself must reach the disk, not only the files.
    flush_to_disk([target.parent])
    shutil.rmtree(old, ignore_errors=True)
