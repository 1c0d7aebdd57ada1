"""Every meta-learning algorithm by the name that configs use; `none` is the learner's own."""

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.algorithms.anil import ANIL
from gmeta.adaptation.algorithms.encoder import ENCODER, ENCODER_MAML
from gmeta.adaptation.algorithms.fomaml import FOMAML
from gmeta.adaptation.algorithms.maml import MAML
from gmeta.adaptation.algorithms.metaemb import META_EMBEDDING
from gmeta.adaptation.algorithms.metasgd import META_SGD
from gmeta.adaptation.algorithms.reptile import REPTILE
from gmeta.adaptation.config import PLAIN

ALGORITHMS: dict[str, Algorithm] = {
    "maml": MAML,
    "fomaml": FOMAML,
    "anil": ANIL,
    "reptile": REPTILE,
    "metasgd": META_SGD,
    "encoder": ENCODER,
    "encoder_maml": ENCODER_MAML,
    "metaemb": META_EMBEDDING,
}


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name; for plain training, the one its evaluation adapts with.

    Raises:
        ValueError: the name is unknown.
    """
    if name == PLAIN:
        return FOMAML
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm.name = {name!r} is unknown: known are {', '.join([*ALGORITHMS, PLAIN])}. "
            "Choose one of them, or register yours in gmeta/adaptation/algorithms/registry.py"
        )
    return ALGORITHMS[name]
