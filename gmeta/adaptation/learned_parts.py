"""The parts that an algorithm learns beside the model and its rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gmeta_models.id_generator import IdGenerator
    from gmeta_models.support_encoder import SupportEncoder


@dataclass(frozen=True)
class LearnedParts:
    """Parts that the inner loop calls once a task or once a row; None: the algorithm has none."""

    encoder: SupportEncoder | None = None  # modulates layers by a task's support rows
    generator: IdGenerator | None = None  # makes the embedding of an id from its content
    generated_table: int = -1  # the place of the table whose embeddings the generator makes


NOTHING_LEARNED = LearnedParts()
