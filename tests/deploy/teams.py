"""Overlays of jobs that stand side by side, as two teams would write them: copies of team-job."""

from pathlib import Path

from tests.deploy.rendering import ROOT

TEAM_JOB = ROOT / "deploy/k8s/overlays/team-job"


def copy_of_team_job(to: Path, team: str, job: str, components: str = "") -> Path:
    """Copy the overlay as its head says: another namespace, another job, other components."""
    to.mkdir(parents=True)
    back = Path("../" * (len(to.resolve().parts) - 1)) / TEAM_JOB.parent.relative_to("/")
    for path in TEAM_JOB.iterdir():
        text = path.read_text()
        if path.name == "kustomization.yaml":
            text = text.replace("namespace: ads", f"namespace: {team}")
            text = text.replace("namePrefix: ctr-", f"namePrefix: {job}-")
            text = text.replace("instance: ctr", f"instance: {job}")
            text = text.replace("components: []", f"components: [{components}]")
            text = text.replace("../../", f"{back}/../")
        (to / path.name).write_text(text)
    return to
