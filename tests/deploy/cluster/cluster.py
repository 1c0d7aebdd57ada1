"""Runs what an overlay renders until its training Job is complete. `make deploy-cluster` applies
the overlay local-cpu as it stands."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.cluster.api import ApiServer
from tests.deploy.cluster.pods import Place, Pod, config_maps
from tests.deploy.network import Host, NoNamespacesError, hosts
from tests.deploy.rendering import ROOT, Manifest, render

_TICK_S = 0.05
KINDS = ("Job", "StatefulSet", "Deployment")  # whose pods run


class WorkloadFailedError(Exception):
    """A Job has used up its retries."""


def status(phase: str, host: Host) -> dict[str, Any]:
    """What a pod's object says of it."""
    ready = {"type": "Ready", "status": str(phase == "Running")}
    return {"phase": phase, "podIP": host.address, "conditions": [ready], "containerStatuses": []}


class Workload:
    """A Job, StatefulSet or Deployment: keeps its pods going. A suspended Job has none."""

    def __init__(self, manifest: Manifest, place: Place, found: list[Host]) -> None:
        self.name = manifest["metadata"]["name"]
        self.is_job = manifest["kind"] == "Job"
        self.spec = manifest["spec"]
        self._place = place
        self._indexed = self.spec.get("completionMode") == "Indexed"
        self._hosts = found
        self._failures = 0
        self.pods: list[Pod] = []
        if self.is_job:
            metadata = {"name": self.name}
            place.api.create("jobs", {"metadata": metadata, "spec": self.spec})
        self._make_pods()

    def _make_pods(self) -> None:
        if not self.suspended:
            self.pods = [self._pod(i) for i in range(len(self._hosts))]

    def _pod(self, index: int) -> Pod:
        spec = dict(self.spec["template"]["spec"])
        name = f"{self.name}-{index}"
        claims = [each["metadata"]["name"] for each in self.spec.get("volumeClaimTemplates", [])]
        spec["volumes"] = [
            *spec["volumes"],
            *({"name": c, "persistentVolumeClaim": {"claimName": f"{c}-{name}"}} for c in claims),
        ]
        number = index if self._indexed else None
        labels = self.spec["template"]["metadata"]["labels"]
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
        }
        body["status"] = status("Running", self._hosts[index])
        self._place.api.create("pods", body)  # once: a pod that takes its place has its name
        return Pod(self._place, name, spec, self._hosts[index], number)

    @property
    def suspended(self) -> bool:
        """Whether the Job waits for somebody to let it start."""
        job = self._place.api.objects["jobs", self.name] if self.is_job else {"spec": {}}
        return bool(job["spec"].get("suspend", False))

    @property
    def complete(self) -> bool:
        """Whether every pod of the Job has succeeded."""
        return self.is_job and bool(self.pods) and all(pod.returncode == 0 for pod in self.pods)

    def poll(self) -> None:
        """Let pods go on, and replace those that have ended too early."""
        if not self.pods:
            self._make_pods()
        for index, pod in enumerate(self.pods):
            pod.poll()
            if pod.returncode is None or (self.is_job and pod.returncode == 0):
                continue
            if self.is_job and not pod.disrupted:
                self._failures += 1
                if self._failures > self.spec["backoffLimit"]:
                    raise WorkloadFailedError(f"{pod.name}: {pod.log()[-3000:]}")
            self.pods[index] = self._pod(index)


class Cluster:
    """The objects of one namespace, running; and the pods that they ask the API server for."""

    def __init__(self, manifests: list[Manifest], network: list[Host], folder: Path) -> None:
        hub, *free = network
        self._folder = folder
        self.api = ApiServer(hub, manifests, folder / "api")
        wanted = [m for m in manifests if m["kind"] in KINDS]
        given = {}
        for manifest in wanted:
            spec = manifest["spec"]
            count = spec.get("parallelism", spec.get("replicas", 1))
            given[manifest["metadata"]["name"]], free = free[:count], free[count:]
        services = {m["metadata"]["name"] for m in manifests if m["kind"] == "Service"}
        (namespace,) = {m["metadata"]["namespace"] for m in wanted}
        names = f"{hub.address} kubernetes.default.svc\n{_names(wanted, services, given)}"
        self._place = place = Place(folder, self.api, namespace, config_maps(manifests), names)
        self._free = free
        self.asked_for: dict[str, Pod] = {}  # by name
        self.workloads = {
            m["metadata"]["name"]: Workload(m, place, given[m["metadata"]["name"]]) for m in wanted
        }

    def pod(self, name: str) -> Pod:
        """The pod that has the name now."""
        return next(p for w in self.workloads.values() for p in w.pods if p.name == name)

    def volume(self, claim: str) -> Path:
        """The folder of a PersistentVolumeClaim."""
        return self._folder / "volumes" / claim

    def run_until(self, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Keep everything going until then. Raises TimeoutError, WorkloadFailedError."""
        until_s = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what}: not within {timeout_s:.0f} s\n{self.logs()}")
            self.poll()
            time.sleep(_TICK_S)

    def poll(self) -> None:
        """Let everything go on as far as it can now. Raises WorkloadFailedError."""
        for workload in self.workloads.values():
            workload.poll()
        self._poll_asked_for()

    def _poll_asked_for(self) -> None:
        for body in self.api.select("pods", ""):
            name = body["metadata"]["name"]
            if "spec" not in body:
                continue  # a workload's
            if name not in self.asked_for:
                host = self._free.pop()
                self.asked_for[name] = Pod(self._place, name, body["spec"], host, None)
            pod = self.asked_for[name]
            pod.poll()
            ended = "Failed" if pod.returncode else "Succeeded"
            phase = ended if pod.returncode is not None else "Running" if pod.runs else "Pending"
            if ("pods", name) in self.api.objects:  # it may be deleted meanwhile
                self.api.set_status("pods", name, status(phase, pod.host))
        for name, pod in self.asked_for.items():
            if ("pods", name) not in self.api.objects:
                if not pod.disrupted:
                    pod.delete()
                pod.poll()

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted((self._folder / "logs").glob("*.log"))
        return "\n".join(f"--- {f.stem}\n{f.read_text(errors='replace')[-2000:]}" for f in files)

    def close(self) -> None:
        """SIGTERM to all pods, then the end of whatever is left."""
        pods = [pod for workload in self.workloads.values() for pod in workload.pods]
        pods += self.asked_for.values()
        for pod in pods:
            if pod.returncode is None:
                pod.delete()
        until_s = time.monotonic() + 30
        while any(pod.returncode is None for pod in pods) and time.monotonic() < until_s:
            for pod in pods:
                pod.poll()
            time.sleep(_TICK_S)
        for pod in pods:
            pod.kill()
        self.api.close()


def _names(workloads: list[Manifest], services: set[str], given: dict[str, list[Host]]) -> str:
    """/etc/hosts with what the cluster's DNS would answer: headless Services and their pods."""
    lines = ["127.0.0.1 localhost"]
    for manifest in workloads:
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        namespace = manifest["metadata"]["namespace"]
        domain = spec.get("serviceName", spec["template"]["spec"].get("subdomain"))
        for index, host in enumerate(given[name]):
            known = [f"{name}-{index}"]
            if domain in services:
                known += [f"{name}-{index}.{domain}", f"{name}-{index}.{domain}.{namespace}.svc"]
            if name in services and spec.get("serviceName") == name:
                known += [name, f"{name}.{namespace}", f"{name}.{namespace}.svc"]
            lines.append(f"{host.address} {' '.join(known)}")
    return "\n".join(lines) + "\n"


@contextmanager
def running(manifests: list[Manifest], folder: Path, more: int = 0) -> Iterator[Cluster]:
    """A cluster with these objects, and hosts for `more` pods. Raises NoNamespacesError."""
    with running_together({folder: manifests}, more) as (cluster,):
        yield cluster


@contextmanager
def running_together(
    manifests: Mapping[Path, list[Manifest]], more: int = 0
) -> Iterator[list[Cluster]]:
    """Objects of several namespaces on one network of pods. Raises NoNamespacesError."""
    counts = [1 + more + _num_pods(each) for each in manifests.values()]
    with contextlib.ExitStack() as stack:
        network, clusters = stack.enter_context(hosts(sum(counts))), []
        for (folder, each), count in zip(manifests.items(), counts, strict=True):
            mine, network = network[:count], network[count:]
            clusters.append(Cluster(each, mine, folder))
            stack.callback(clusters[-1].close)
        yield clusters


def _num_pods(manifests: list[Manifest]) -> int:
    specs = [m["spec"] for m in manifests if m["kind"] in KINDS]
    return sum(spec.get("parallelism", spec.get("replicas", 1)) for spec in specs)


def main() -> int:
    """Apply the overlay local-cpu, tell when something changes, end with the run's log."""
    told: dict[str, Any] = {}
    begin_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        try:
            cluster = stack.enter_context(
                running(render(ROOT / "deploy/k8s/overlays/local-cpu"), folder)
            )
        except NoNamespacesError as error:
            print(f"skipped: no network namespaces here: {error}")
            return 0
        train = cluster.workloads["gmeta-train"]

        def complete() -> bool:
            for workload in cluster.workloads.values():
                states = {
                    p.name: "complete" if p.returncode == 0 else "runs" if p.runs else "waits"
                    for p in workload.pods
                }
                for name, state in states.items():
                    if told.get(name) != state:
                        print(f"{time.monotonic() - begin_s:6.1f} s  {name} {state}", flush=True)
                told.update(states)
            return train.complete

        cluster.run_until(complete, "the training Job's completion", 900)
        print(cluster.pod("gmeta-train-0").log())
    return 0


if __name__ == "__main__":
    sys.exit(main())
