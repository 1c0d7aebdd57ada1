"""Every meta-learning algorithm by the name that configs use; other packages add theirs by an entry
point or an import path."""

from collections import ChainMap

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.algorithms.anil import ANIL
from gmeta.adaptation.algorithms.encoder import ENCODER, ENCODER_MAML
from gmeta.adaptation.algorithms.fomaml import FOMAML
from gmeta.adaptation.algorithms.maml import MAML
from gmeta.adaptation.algorithms.metaemb import META_EMBEDDING
from gmeta.adaptation.algorithms.metasgd import META_SGD
from gmeta.adaptation.algorithms.reptile import REPTILE
from gmeta.adaptation.algorithms.ridge import RIDGE
from gmeta.config.algorithm import PLAIN
from gmeta_keys.plugins import Registry

ALGORITHMS: dict[str, Algorithm] = {
    "maml": MAML,
    "fomaml": FOMAML,
    "anil": ANIL,
    "reptile": REPTILE,
    "metasgd": META_SGD,
    "encoder": ENCODER,
    "encoder_maml": ENCODER_MAML,
    "ridge": RIDGE,
    "metaemb": META_EMBEDDING,
}

NAMED_ALGORITHMS = Registry(
    "algorithm.name",
    "gmeta.algorithms",
    ChainMap({PLAIN: FOMAML}, ALGORITHMS),  # what the evaluation of plain training adapts with
    "a value of gmeta.adaptation.algorithms.algorithm.Algorithm",
    lambda found: isinstance(found, Algorithm),
)


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name; for plain training, the one its evaluation adapts with.
    Raises ValueError: there is none."""
    return NAMED_ALGORITHMS.find(name)
