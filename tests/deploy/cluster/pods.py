"""Pods as the kubelet makes them of a template: variables, volumes, one container after another."""

import base64
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.deploy.cluster.api import ApiServer
from tests.deploy.cluster.container import Container, Mount
from tests.deploy.network import Host
from tests.deploy.rendering import ROOT, Manifest
from tests.support.forked import SOURCE_ROOTS

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_PROGRAMS = b"/opt/gmeta/bin/"
_DOCKERFILES = {
    "gmeta-service": "service",
    "gmeta-trainer-cpu": "trainer-cpu",
    "gmeta-prepare-spark": "prepare-spark",
}


@dataclass(frozen=True)
class Image:
    """What a Dockerfile says of how its image starts."""

    entrypoint: list[str]
    folder: str
    env: dict[str, str]


@cache
def image_of(name: str) -> Image:
    """The image by its name in a manifest."""
    file = _DOCKERFILES[name.rpartition("/")[2].partition(":")[0]]
    text = (ROOT / f"deploy/docker/{file}.Dockerfile").read_text().replace("\\\n", " ")
    stage = text[text.rindex("\nFROM ") :]
    said = {
        word: re.findall(rf"^{word} (.*)$", stage, flags=re.MULTILINE)
        for word in ("ENTRYPOINT", "WORKDIR", "ENV")
    }
    env = dict(pair.split("=", 1) for line in said["ENV"] for pair in shlex.split(line))
    env["PATH"] = "/opt/gmeta/bin:/usr/local/bin:/usr/bin:/bin"
    # In the image the packages are installed; here they are beside each other.
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS)
    return Image(json.loads(said["ENTRYPOINT"][-1]), said["WORKDIR"][-1], env)


@dataclass(frozen=True)
class Place:
    """What all pods of the cluster share."""

    folder: Path
    api: ApiServer
    namespace: str
    config_maps: dict[str, dict[str, str]]
    hosts: str  # /etc/hosts


class Pod:
    """One pod: waits for its Secrets, runs its init containers, then its container."""

    def __init__(
        self, place: Place, name: str, spec: dict[str, Any], host: Host, index: int | None
    ) -> None:
        self.name, self.spec, self.host, self.index = name, spec, host, index
        self.disrupted = False
        self.returncode: int | None = None
        self._place = place
        self._waiting = [*spec.get("initContainers", []), *spec["containers"]]
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at_s = float("inf")

    def poll(self) -> None:
        """Go on as far as is possible now."""
        if self.returncode is not None:
            return
        if self._process is None:
            if self._waiting and self._secrets_are_there():
                self._start(self._waiting.pop(0))
            return
        code = self._process.poll()
        if code is None:
            if self.disrupted and self._kill_at_s == float("inf"):
                self._terminate()
            elif time.monotonic() > self._kill_at_s:
                self.kill()
            return
        self._process = None
        if code or not self._waiting:
            self.returncode = code

    @property
    def runs(self) -> bool:
        """Whether its last container, the one that matters, has been started and goes on."""
        return self._process is not None and not self._waiting

    def delete(self) -> None:
        """As a drain does: SIGTERM, and SIGKILL when the grace period is over."""
        self.disrupted = True
        if self._process is None:
            self.returncode = -signal.SIGTERM

    def _terminate(self) -> None:
        """SIGTERM to process 1, once the container's command is that."""
        assert self._process is not None
        pid = self._process.pid
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                # Not yet while it is the set-up or the script that stands for a program.
                if any(b"container.py" in word or word.startswith(_PROGRAMS) for word in words):
                    continue
                os.kill(int(child), signal.SIGTERM)
                grace_s = self.spec.get("terminationGracePeriodSeconds", 30)
                self._kill_at_s = time.monotonic() + grace_s

    def kill(self) -> None:
        """SIGKILL to everything in it."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.host.namespace], capture_output=True, text=True, check=True
        )
        subprocess.run(["kill", "-9", *pids.stdout.split()], capture_output=True, check=False)

    def log(self) -> str:
        """What its containers have printed, those of earlier pods of this name too."""
        path = self._log_path()
        return path.read_text(errors="replace") if path.exists() else ""

    def _log_path(self) -> Path:
        return self._place.folder / "logs" / f"{self.name}.log"

    def _secrets_are_there(self) -> bool:
        names = [v["secret"]["secretName"] for v in self.spec["volumes"] if "secret" in v]
        return all(("secrets", name) in self._place.api.objects for name in names)

    def _start(self, container: dict[str, Any]) -> None:
        self._log_path().parent.mkdir(parents=True, exist_ok=True)
        with self._log_path().open("a") as log:
            self._process = subprocess.Popen(
                self.host.command(*self._container(container).command()), stdout=log, stderr=log
            )

    def _container(self, given: dict[str, Any]) -> Container:
        image, context = image_of(given["image"]), self.spec["securityContext"]
        env = {**image.env, **self._variables(given.get("env", []))}
        command = given.get("command", image.entrypoint)
        # The kubelet puts variables in here too.
        argv = [_expand(word, env) for word in [*command, *given.get("args", [])]]
        return Container(
            argv=argv, env=env, mounts=self._mounts(given.get("volumeMounts", [])),
            hostname=self.name, hosts=f"{self._place.hosts}{self.host.address} {self.name}\n",
            user=context["runAsUser"], group=context["runAsGroup"],
            volume_group=context["fsGroup"], folder=image.folder,
            read_only_root=given["securityContext"]["readOnlyRootFilesystem"],
        )  # fmt: skip

    def _variables(self, given: list[dict[str, Any]]) -> dict[str, str]:
        fields = {
            "status.podIP": self.host.address,
            "metadata.name": self.name,
            "metadata.namespace": self._place.namespace,
        }
        env = {"HOSTNAME": self.name}
        env["KUBERNETES_SERVICE_HOST"] = self._place.api.address
        env["KUBERNETES_SERVICE_PORT"] = "443"
        if self.index is not None:
            env["JOB_COMPLETION_INDEX"] = str(self.index)
        for variable in given:
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            text = variable.get("value") or ""
            env[variable["name"]] = fields[source] if source else _expand(text, env)
        return env

    def _mounts(self, given: list[dict[str, Any]]) -> list[Mount]:
        sources = {volume["name"]: self._source(volume) for volume in self.spec["volumes"]}
        mounts = [
            Mount(str(sources[each["name"]]), each["mountPath"], each.get("readOnly", False))
            for each in given
        ]
        if self.spec.get("automountServiceAccountToken", True):
            account = self.spec["serviceAccountName"]
            folder = self._place.api.account_folder(account, self._own("account"))
            mounts.append(Mount(str(folder), _ACCOUNT, read_only=True))
        return mounts

    def _own(self, name: str) -> Path:
        return self._place.folder / "pods" / self.name / name

    def _source(self, volume: dict[str, Any]) -> Path:
        """The folder on this machine that a volume is; its group may write, as fsGroup has it."""
        if claim := volume.get("persistentVolumeClaim"):
            folder = self._place.folder / "volumes" / claim["claimName"]
        else:
            folder = self._own(volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        if secret := volume.get("secret"):
            data = self._place.api.objects["secrets", secret["secretName"]]["data"]
            _fill(folder, {name: base64.b64decode(text) for name, text in data.items()}, 0o440)
        elif config := volume.get("configMap"):
            held = self._place.config_maps[config["name"]]
            _fill(folder, {name: text.encode() for name, text in held.items()}, 0o644)
        group = self.spec["securityContext"]["fsGroup"]
        for path in [folder, *folder.iterdir()] if "secret" in volume else [folder]:
            subprocess.run(["chgrp", str(group), str(path)], check=True)
        folder.chmod(0o2775)
        return folder


def _fill(folder: Path, files: dict[str, bytes], mode: int) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(mode)


def _expand(text: str, env: dict[str, str]) -> str:
    """$(NAME) becomes the variable, where there is one."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)


def config_maps(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    """The data of every ConfigMap."""
    return {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
