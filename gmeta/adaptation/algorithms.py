"""Every meta-learning algorithm by the name that configs use; `none` is the learner's own."""

from gmeta.adaptation.algorithm import Algorithm
from gmeta.adaptation.anil import ANIL
from gmeta.adaptation.config import PLAIN
from gmeta.adaptation.fomaml import FOMAML
from gmeta.adaptation.maml import MAML
from gmeta.adaptation.metasgd import META_SGD
from gmeta.adaptation.reptile import REPTILE

ALGORITHMS: dict[str, Algorithm] = {
    "maml": MAML,
    "fomaml": FOMAML,
    "anil": ANIL,
    "reptile": REPTILE,
    "metasgd": META_SGD,
}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of this name; for plain training the one that its evaluation adapts with.

    Raises:
        ValueError: the name is unknown.
    """
    if name == PLAIN:
        return FOMAML
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm.name = {name!r} is unknown: known are {', '.join([*ALGORITHMS, PLAIN])}. "
            "Choose one of them, or register yours in gmeta/adaptation/algorithms.py"
        )
    return ALGORITHMS[name]
