"""House rules for pods and for what refers to what: what schemas cannot see."""

import re
from typing import Any

from tests.deploy.rendering import ROOT, Manifest, name_of, pod_specs

# The pods that talk to the API server: one makes the Secrets, one starts training, Spark's driver
# makes its executors.
MAY_HAVE_A_TOKEN = (
    "gmeta-credentials",
    "gmeta-train-start",
    "gmeta-prepare",
)  # a job's own prefix goes before
HOLDERS = ("service", "tokens", "worker", "operator", "viewer", "spark")
# Of a cluster, not of a job.
PRIORITIES = {"gmeta-service", "gmeta-training", "gmeta-serve"}
_VOLUMES = {"name", "configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
_UNITS = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}
_SECRET_NAME = re.compile(r"TOKEN|PASSWORD|SECRET|CREDENTIAL|_KEY$")


def amount(quantity: str | int) -> float:
    """500m, 2Gi or 8 as a number."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert match is not None, quantity
    return float(match[1]) * _UNITS[match[2]]


def image_problem(image: str) -> str | None:
    """Images of others need a digest, ours a tag that is not `latest` (a digest once pushed)."""
    if re.search("@sha256:[0-9a-f]{64}$", image):
        return None
    name, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:
        return f"image {image!r} has no tag"
    if tag == "latest":
        return f"image {image!r} is a moving target"
    if not name.rpartition("/")[2].startswith("gmeta-"):
        return f"image {image!r} has no digest: a tag can be moved. Run: make deploy-pin"
    return None


def pod_problems(manifest: Manifest) -> list[str]:
    """Breaches of the rules for pods, one line each."""
    problems = []
    for _, spec in pod_specs(manifest):
        context = spec.get("securityContext", {})
        account = spec.get("serviceAccountName", "default")
        automount = spec.get("automountServiceAccountToken", True)
        rules = {
            "runAsNonRoot is not set": context.get("runAsNonRoot") is True,
            "the pod runs as root": context.get("runAsUser", 0) != 0,
            "no seccomp profile": context.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "it shares a namespace of its host": not any(
                spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")
            ),
            "it mounts what Pod Security `restricted` refuses": all(
                volume.keys() <= _VOLUMES for volume in spec.get("volumes", [])
            ),
            "it has no priority": "priorityClassName" in spec,
            "each start changes the owner of every file of a volume: set fsGroupChangePolicy": (
                context.get("fsGroupChangePolicy") == "OnRootMismatch"
                or not any("persistentVolumeClaim" in each for each in spec.get("volumes", []))
            ),
            f"account {account} gets a token": not automount or account.endswith(MAY_HAVE_A_TOKEN),
        }
        problems += [rule for rule, kept in rules.items() if not kept]
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        claims = manifest["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"] for claim in claims}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            problems += [
                f"container {container['name']}: {rule}"
                for rule in _container_problems(container, volumes)
            ]
    return [f"{name_of(manifest)}: {problem}" for problem in problems]


def _container_problems(container: dict[str, Any], volumes: set[str]) -> list[str]:
    context = container.get("securityContext", {})
    problems = [
        rule
        for rule, kept in {
            "may gain privileges": context.get("allowPrivilegeEscalation") is False,
            "its root file system can be written": context.get("readOnlyRootFilesystem") is True,
            "keeps capabilities": context.get("capabilities", {}).get("drop") == ["ALL"],
            "is privileged": not context.get("privileged"),
            "its process 1 ignores SIGTERM: begin the command with dumb-init": not (
                {*container.get("command", ["-"])[:1]} & {"sh", "bash", "gmeta", "python"}
            ),
            "takes a port of its host": not any(
                "hostPort" in p for p in container.get("ports", [])
            ),
        }.items()
        if not kept
    ]
    problems += [
        f"its {name} has a second, which a slow volume takes longer than: set timeoutSeconds"
        for name, probe in container.items()
        if name.endswith("Probe") and "exec" in probe and probe.get("timeoutSeconds", 1) < 5
    ]
    found = image_problem(container.get("image", ""))
    problems += [found] if found else []
    resources = container.get("resources", {})
    for name in ("cpu", "memory", "ephemeral-storage"):
        request = resources.get("requests", {}).get(name)
        limit = resources.get("limits", {}).get(name)
        if request is None or limit is None:
            problems.append(f"{name} has request {request} and limit {limit}: both are needed")
        elif amount(request) > amount(limit):
            problems.append(f"{name}: the request {request} is above the limit {limit}")
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            problems.append(f"mounts {mount['name']}, which is no volume of the pod")
    for variable in container.get("env", []):
        value = str(variable.get("value", ""))
        if _SECRET_NAME.search(variable["name"]) and value and not value.startswith("/run/"):
            problems.append(f"{variable['name']} holds a secret; name a file under /run")
    return problems


def made_secrets(manifests: list[Manifest]) -> set[str]:
    """Names of the Secrets that deploy/credentials.py makes: no manifest has them."""
    return {
        f"{variable['value']}-{holder}"
        for manifest in manifests
        for _, spec in pod_specs(manifest)
        for container in spec["containers"]
        for variable in container.get("env", [])
        if variable["name"] == "PREFIX"
        for holder in HOLDERS
    }


def end_problems(manifests: list[Manifest]) -> list[str]:
    """Jobs end and are removed by themselves, and a pod that is not ready holds up no drain."""
    problems = []
    for manifest in manifests:
        kind, spec = manifest["kind"], manifest.get("spec", {})
        if kind == "Job":
            problems += [
                f"{name_of(manifest)}: it has no {key}"
                for key in ("activeDeadlineSeconds", "ttlSecondsAfterFinished")
                if key not in spec
            ]
        if (
            kind == "PodDisruptionBudget"
            and spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow"
        ):
            problems.append(
                f"{name_of(manifest)}: pods that are not ready hold up drains: "
                "set unhealthyPodEvictionPolicy"
            )
    return problems


def _chooses(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector's labels, and its expressions (`In` alone), fit."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def caller_problems(manifests: list[Manifest]) -> list[str]:
    """Pods that one policy lets in, but that another lets out nowhere near."""
    policies = [m for m in manifests if m["kind"] == "NetworkPolicy"]
    pods = [pod for m in manifests for pod in pod_specs(m)]
    problems = []
    for policy in policies:
        target = policy["spec"]["podSelector"]
        numbers = {
            port.get("name", port["containerPort"]): port["containerPort"]
            for labels, spec in pods
            if _chooses(target, labels)
            for container in spec["containers"]
            for port in container.get("ports", [])
        }
        for rule in policy["spec"].get("ingress", []):
            ports = {numbers.get(port["port"], port["port"]) for port in rule.get("ports", [])}
            callers = [
                peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer
            ]
            for caller in callers:
                out = [
                    each
                    for other in policies
                    if _chooses(other["spec"]["podSelector"], caller)
                    for each in other["spec"].get("egress", [])
                    if any(
                        _chooses(
                            peer.get("podSelector", {"matchLabels": {"": ""}}),
                            target["matchLabels"],
                        )
                        for peer in each.get("to", [])
                    )
                ]
                let_out = {port["port"] for each in out for port in each.get("ports", [])}
                if not any("ports" not in one for one in out) and not (ports and ports <= let_out):
                    problems.append(
                        f"{name_of(policy)}: lets in {caller}, which no policy lets out to it"
                    )
    return problems


def size_problems(manifests: list[Manifest]) -> list[str]:
    """Nodes are as many wherever the number stands, and a drain may take one of them."""
    problems = []
    for manifest in manifests:
        if manifest["kind"] != "Job" or manifest["spec"].get("completionMode") != "Indexed":
            continue
        spec = manifest["spec"]
        env = spec["template"]["spec"]["containers"][0]["env"]
        nodes = next(each["value"] for each in env if each["name"] == "NNODES").rpartition(":")[2]
        said = {spec["completions"], spec["parallelism"], int(nodes)}
        if len(said) > 1:
            problems.append(
                f"{name_of(manifest)}: completions, parallelism and NNODES say {sorted(said)}"
            )
        budget = [
            each["spec"].get("minAvailable", 0)
            for each in manifests
            if each["kind"] == "PodDisruptionBudget"
            and each["metadata"]["name"] == manifest["metadata"]["name"]
        ]
        if budget != [int(nodes) - 1]:
            problems.append(
                f"{name_of(manifest)}: {nodes} nodes and minAvailable {budget} of its "
                "PodDisruptionBudget: drains take one node at a time with one less than there are"
            )
    return problems


def reference_problems(manifests: list[Manifest]) -> list[str]:
    """References between objects that lead nowhere, one line each."""
    names: dict[str, set[str]] = {"Secret": made_secrets(manifests), "PriorityClass": PRIORITIES}
    for manifest in manifests:
        kind = manifest["kind"]
        names[kind] = names.get(kind, set()) | {manifest["metadata"]["name"]}
    pods = [(m, *pod) for m in manifests for pod in pod_specs(m)]
    problems = []
    for manifest, _, spec in pods:
        wanted = [
            ("ServiceAccount", spec.get("serviceAccountName")),
            ("PriorityClass", spec.get("priorityClassName")),
        ]
        for volume in spec.get("volumes", []):
            wanted += [
                ("ConfigMap", volume.get("configMap", {}).get("name")),
                ("Secret", volume.get("secret", {}).get("secretName")),
                ("PersistentVolumeClaim", volume.get("persistentVolumeClaim", {}).get("claimName")),
            ]
        problems += [
            f"{name_of(manifest)}: there is no {kind} {name}"
            for kind, name in wanted
            if name and name not in names.get(kind, set())
        ]
    for manifest in manifests:
        problems += _selector_problems(manifest, [(labels, spec) for _, labels, spec in pods])
    return problems


def _selector_problems(
    manifest: Manifest, pods: list[tuple[dict[str, str], dict[str, Any]]]
) -> list[str]:
    spec, kind = manifest.get("spec", {}), manifest["kind"]
    selector = {
        "Service": spec.get("selector"),
        "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels"),
        "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
        "StatefulSet": spec.get("selector", {}).get("matchLabels"),
    }.get(kind)
    if selector is None:
        return []
    chosen = [pod for labels, pod in pods if selector.items() <= labels.items()]
    if not chosen:
        return [f"{name_of(manifest)}: its selector {selector} chooses no pod"]
    offered = {
        port.get("name"): port["containerPort"]
        for pod in chosen
        for container in pod["containers"]
        for port in container.get("ports", [])
    }
    asked = [port.get("targetPort") for port in spec.get("ports", [])] if kind == "Service" else []
    if kind == "NetworkPolicy":
        asked = [p["port"] for rule in spec.get("ingress", []) for p in rule.get("ports", [])]
    return [
        f"{name_of(manifest)}: the pods have no port {port}"
        for port in asked
        if port not in offered and port not in offered.values()
    ]


def exposure_problems(manifests: list[Manifest]) -> list[str]:
    """Every pod is closed by default, and each port that one opens is in the table of the docs."""
    closed = [
        manifest["spec"]["podSelector"].get("matchLabels", {})
        for manifest in manifests
        if manifest["kind"] == "NetworkPolicy" and len(manifest["spec"]["policyTypes"]) == 2
    ]
    documented = set(
        re.findall(r"^\| (\d+) \|", (ROOT / "docs/deploy.md").read_text(), flags=re.MULTILINE)
    )
    problems = []
    for manifest in manifests:
        for labels, spec in pod_specs(manifest):
            if not any(selector.items() <= labels.items() for selector in closed):
                problems.append(f"{name_of(manifest)}: no NetworkPolicy closes its pods")
            for container in spec["containers"]:
                for port in container.get("ports", []):
                    if str(port["containerPort"]) not in documented:
                        number = port["containerPort"]
                        problems.append(
                            f"{name_of(manifest)}: port {number} is not in docs/deploy.md"
                        )
    return problems
