"""Starts a command as a container runtime would: in a root file system of its own, volumes where
the pod has them, with the pod's name and user and no privileges. Run as a script it does so."""

import ctypes
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_PR_SET_NO_NEW_PRIVS = 38
# What the images hold of this repository.
_CODE = ("gmeta", "metaio", "models", "protos", "deploy", "examples")
# /bin of the images: name, and what stands for it.
_PROGRAMS = {
    "python": f'exec {sys.executable} "$@"',
    "gmeta": f'exec {sys.executable} -m gmeta "$@"',
    "gmeta-credentials": f'exec {sys.executable} {ROOT}/deploy/credentials.py "$@"',
    "gmeta-resume": f'exec {sys.executable} {ROOT}/deploy/resume.py "$@"',
    "train-node": f'exec {ROOT}/deploy/docker/train-node "$@"',
    "spark-node": f'exec {ROOT}/deploy/docker/spark-node "$@"',
    "dumb-init": f'exec {Path(sys.executable).with_name("dumb-init")} "$@"',
}


@dataclass(frozen=True)
class Mount:
    """A volume of the pod, in a container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class Container:
    """One container of a pod, ready to start."""

    argv: list[str]
    env: dict[str, str]
    mounts: list[Mount]
    hostname: str
    hosts: str  # the text of /etc/hosts: there is no DNS
    user: int
    group: int
    volume_group: int
    folder: str  # WORKDIR of the image
    read_only_root: bool

    def command(self) -> list[str]:
        """The command line whose only child becomes the container: process 1 of its own."""
        return [
            "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child",
            sys.executable, __file__, json.dumps(asdict(self)),
        ]  # fmt: skip


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def _bind(source: Path, target: Path, read_only: bool = True) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--rbind", source, target)
    if read_only:
        _mount("-o", "remount,ro,bind", target)


def _lay(root: Path, hosts: str, user: int, group: int) -> None:
    """What stands for the image's system: this machine's, and the programs of the image."""
    for name in ("usr", "bin", "sbin", "lib", "lib64"):
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(os.readlink(source))
        elif source.exists():
            _bind(source, root / name)
    for name in ("dev", "sys"):
        _bind(Path("/", name), root / name, read_only=False)
    (root / "proc").mkdir()
    _mount("-t", "proc", "proc", root / "proc")
    etc = root / "etc"
    etc.mkdir()
    (etc / "passwd").write_text(f"root:x:0:0::/:/bin/sh\ngmeta:x:{user}:{group}::/tmp:/bin/sh\n")
    (etc / "group").write_text(f"root:x:0:\ngmeta:x:{group}:\n")
    (etc / "nsswitch.conf").write_text("hosts: files\n")
    (etc / "hosts").write_text(hosts)
    for name in ("ld.so.cache", "ssl", "alternatives", "java-17-openjdk"):
        if Path("/etc", name).exists():
            _bind(Path("/etc", name), etc / name)
    java, spark = shutil.which("java"), importlib.util.find_spec("pyspark")
    if java and spark and spark.origin:
        for name in ("java", "spark"):
            (root / "opt" / name).mkdir(parents=True)
        (root / "opt/java/openjdk").symlink_to(Path(java).resolve().parents[1])
        (root / "opt/spark/pyspark").symlink_to(Path(spark.origin).parent)
    programs = root / "opt/gmeta/bin"
    programs.mkdir(parents=True)
    for name, line in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)


def _lay_code(root: Path) -> None:
    """This repository and this Python, where they are here: scripts name each other by path."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    code = [str(ROOT / name) for name in _CODE]
    for path in dict.fromkeys([*code, sys.base_prefix, sys.prefix, *packages]):
        _bind(Path(path), root / path[1:])


def _become(container: Container) -> None:
    """In a new mount namespace, as root: set everything up, then be the command."""
    root = Path("/mnt")
    _mount("-t", "tmpfs", "-o", "mode=755,size=1m", "root", root)
    _lay(root, container.hosts, container.user, container.group)
    for name in ("data", "runs", container.folder):
        (root / name.strip("/")).mkdir(parents=True, exist_ok=True)
    # Outer mount points first, so that /dev/shm lies on /dev and not under it.
    for mount in sorted(container.mounts, key=lambda each: each.target):
        _bind(Path(mount.source), root / mount.target[1:], mount.read_only)
    _lay_code(root)  # on top: it may lie below /tmp
    if container.read_only_root:
        _mount("-o", "remount,ro", root)
    socket.sethostname(container.hostname)
    os.chroot(root)
    os.chdir(container.folder)
    os.setgroups([container.volume_group])
    os.setgid(container.group)
    os.setuid(container.user)  # and all capabilities are gone
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execvpe(container.argv[0], container.argv, container.env)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["mounts"] = [Mount(**mount) for mount in given["mounts"]]
    _become(Container(**given))
