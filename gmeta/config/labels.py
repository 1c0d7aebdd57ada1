"""What can be chosen about the labels; the [labels] section of a training config."""

from dataclasses import dataclass

from gmeta.config.losses import NAMED_LOSSES, Loss, kind_of_loss
from gmeta_keys import key


@dataclass(frozen=True)
class LabelsConfig:
    """What is learnt of each label of a dataset that has several; docs/training.md."""

    loss: dict[str, str] = key(
        dict, "by label: its loss, as outer.loss has it, which is that of labels not named here"
    )
    weight: dict[str, float] = key(dict, "by label: what its loss is multiplied by; else 1")
    adapt: tuple[str, ...] = key((), "labels that the inner loop adapts on; []: all")
    entire_space: dict[str, str] = key(
        dict,
        "by label: an earlier one that it takes place among, such as a purchase among clicks "
        "(ESMM)",
    )
    judged: str = key("", "label of the headline metrics; empty: the first")
    standardise: bool = key(
        False,
        "labels that are any number are learnt less their mean, in deviations; predictions "
        "and metrics keep their units",
    )
    moments: tuple[float, ...] = key(
        (), "standardise: mean and deviation of each label; []: of the run before, or of the data"
    )

    def check(self, names: tuple[str, ...]) -> None:
        """Raise ValueError for a label not in a dataset's `names`, or a senseless value."""
        named = {key: getattr(self, key) for key in ("weight", "loss", "adapt", "entire_space")}
        named["judged"] = [self.judged] if self.judged else []
        for own, columns in named.items():
            for name in columns:
                if name not in names:
                    has = ", ".join(names) or "one without a name"
                    raise ValueError(
                        f"labels.{own} names {name!r}, which is no label of the dataset: it has "
                        f"{has}. Name one of them, or take it out"
                    )
        for name, loss in self.loss.items():
            NAMED_LOSSES.check_named(loss, f"labels.loss.{name}")
        if self.moments and (
            len(self.moments) != 2 * max(len(names), 1) or min(self.moments[1::2]) <= 0
        ):
            raise ValueError(
                f"labels.moments = {list(self.moments)} is no mean and deviation above 0 of each "
                "label. Write e.g. [3.6, 1.1], or [] to take them from the training split"
            )
        for name, weight in self.weight.items():
            if weight < 0:
                raise ValueError(
                    f"labels.weight.{name} = {weight} is too small: at least 0 is allowed. Correct "
                    "the value"
                )
        if names and not any(self.weight.get(name, 1.0) for name in names):
            raise ValueError(
                "labels.weight is 0 for every label: nothing would be learnt. Raise one"
            )
        if self.adapt and not any(self.weight.get(name, 1.0) for name in self.adapt):
            raise ValueError(
                "labels.weight is 0 for every label of labels.adapt: nothing would adapt. Raise one"
            )
        for name, before in self.entire_space.items():
            if before not in names[: names.index(name)]:
                raise ValueError(
                    f"labels.entire_space.{name} = {before!r}: a label before {name} in the schema "
                    f"is needed: {', '.join(names[: names.index(name)]) or 'there is none'}. Name "
                    "one of them, or change the order of [[label]]"
                )

    def judged_index(self, names: tuple[str, ...]) -> int:
        """Return the place of the label that headline metrics are of."""
        return names.index(self.judged) if self.judged else 0

    def losses_of(self, loss: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the loss of each label; `loss` is that of labels without one of their own."""
        return tuple(self.loss.get(name, loss) for name in names) or (loss,)

    def list_losses(self, loss: str) -> list[str]:
        """Return all losses that are named; `loss` is that of labels without one of their own."""
        return sorted({loss, *self.loss.values()})

    def loss_kinds(self, loss: str, names: tuple[str, ...]) -> tuple[Loss, ...]:
        """Return the same, with a loss of ours in place of a package's own: `kind_of_loss`."""
        return tuple(map(kind_of_loss, self.losses_of(loss, names)))
