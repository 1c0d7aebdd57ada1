"""One increment of a stream and its outcome, as the page shows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gmeta.serving.channel.model_version import Version
from metaio.stream.chain import IncrementRecord


@dataclass(frozen=True)
class Day:
    """One increment and its outcome."""

    record: IncrementRecord
    # In seconds since 1970.
    window_s: tuple[float, float]
    verdict: Mapping[str, Any] = field(default_factory=dict)
    version: Version | None = None
    # Scores of the increment: by the model that goes on, before it is trained on it, and by the
    # first.
    forecast: Mapping[str, float] = field(default_factory=dict)
    frozen: Mapping[str, float] = field(default_factory=dict)
    best_auc: float | None = None
    challenge: Mapping[str, Any] = field(default_factory=dict)  # verdict against follow.takes_over
    # By stage.
    took_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def new(self) -> int:
        """Return the number of ids that got a row."""
        return sum(table["new"] for table in self.record.report["tables"].values())

    @property
    def freed(self) -> int:
        """Return the number of ids that lost their row."""
        return sum(table["freed"] for table in self.record.report["tables"].values())

    @property
    def refused(self) -> bool:
        """Return whether its candidate was refused."""
        return self.verdict.get("verdict") == "refuse"

    @property
    def challenge_scores(self) -> str:
        """Return the scores of the model and of that of another shape beside it; "" of none."""
        if not self.challenge:
            return ""
        texts = [f"against version {self.challenge.get('champion_version')}"]
        for who in ("candidate", "champion"):
            scores = (self.challenge.get(who) or {}).items()
            texts += [f"{who} {name} {value:.4f}" for name, value in scores if value is not None]
        gain = self.challenge.get("difference") or {}
        if None not in (gain.get("value"), gain.get("low"), gain.get("high")):
            texts.append(
                f"loss lower by {gain['value']:.4f} ({gain['low']:.4f} to {gain['high']:.4f})"
            )
        return ", ".join(texts)

    @property
    def decision(self) -> tuple[str, str, str]:
        """Return what was decided, why in figures or words, and whether it is good or bad."""
        if not self.verdict:
            return "not judged yet", "", ""
        if self.refused:
            return "refused", "; ".join(self.verdict["reasons"]), "bad"
        gain, margin = self.verdict.get("difference") or {}, self.verdict.get("margin")
        if gain.get("value") is None:
            return "promoted", "nothing to compare with", "good"
        side = "lower" if gain["value"] >= 0 else "higher"
        bound = "" if margin is None else f"; up to {margin:.4f} higher is allowed"
        return "promoted", f"loss {side} by {abs(gain['value']):.4f}{bound}", "good"
