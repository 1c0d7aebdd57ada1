"""What the accounts of a rendering may do on the API server: `kubectl auth can-i` over Roles."""

from typing import Any

from tests.deploy.rendering import Manifest, name_of

_READS = {"get", "list", "watch"}


def rules_of(manifests: list[Manifest], account: str) -> list[dict[str, Any]]:
    """The rules that bind an account of the namespace."""
    bound = {
        manifest["roleRef"]["name"]
        for manifest in manifests
        if manifest["kind"] == "RoleBinding"
        for subject in manifest["subjects"]
        if (subject["kind"], subject["name"]) == ("ServiceAccount", account)
    }
    return [
        rule
        for manifest in manifests
        if manifest["kind"] == "Role" and manifest["metadata"]["name"] in bound
        for rule in manifest["rules"]
    ]


def can_i(
    manifests: list[Manifest], account: str, verb: str, resource: str, name: str | None = None,
    group: str = "",
) -> bool:  # fmt: skip
    """Whether the account may, in its own namespace; "" is the core group."""
    return any(
        group in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        and ("resourceNames" not in rule or name in rule["resourceNames"])
        for rule in rules_of(manifests, account)
    )


def rbac_problems(manifests: list[Manifest]) -> list[str]:
    """Rights beyond what a job of this namespace needs, one line each."""
    roles = {m["metadata"]["name"] for m in manifests if m["kind"] == "Role"}
    problems = []
    for manifest in manifests:
        kind, name = manifest["kind"], name_of(manifest)
        if kind in ("ClusterRole", "ClusterRoleBinding"):
            problems.append(f"{name}: rights beyond the namespace")
        if kind == "RoleBinding" and manifest["roleRef"]["name"] not in roles:
            problems.append(f"{name}: there is no Role {manifest['roleRef']['name']}")
        for rule in manifest["rules"] if kind == "Role" else []:
            if "*" in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]:
                problems.append(f"{name}: a wildcard grants what a later version adds")
            secret = "secrets" in rule["resources"] and not rule.get("resourceNames")
            if secret and _READS & set(rule["verbs"]):
                problems.append(f"{name}: reads every Secret of the namespace")
    return problems
