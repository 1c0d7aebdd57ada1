"""ANIL: MAML that adapts the head alone.

    theta = (body, head),   head_t = k steps of  head <- head - a grad_head L_support,t(body, head)

Raghu et al., "Rapid Learning or Feature Reuse? Towards Understanding the Effectiveness of MAML",
arXiv 1909.09157. The head is the model's last linear layer by order of definition, or that of each
of its towers; the body (all other layers and the tables) learns in the outer loop only, from the
same second-order gradient."""

from dataclasses import replace

from torch import nn

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.algorithms.maml import QueryLoss
from gmeta.config.algorithm import AlgorithmConfig
from gmeta_models.gated import head_layers


def head_only(model: nn.Module, config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the config with the head alone to adapt. Raises ValueError: it names other layers."""
    heads = tuple(head_layers(model))
    if config.adapt_layers not in (heads, AlgorithmConfig.adapt_layers):
        raise ValueError(
            f"algorithm.adapt_layers = {list(config.adapt_layers)} with "
            'algorithm.name = "anil": ANIL adapts the head alone, here '
            f"{', '.join(map(repr, heads))}. "
            'Leave adapt_layers out, or set algorithm.name = "maml"'
        )
    return replace(config, adapt_layers=heads, adapt_embeddings=False)


ANIL = Algorithm(QueryLoss(second_order=True), preset=head_only)
