"""Forward-only adaptation: an encoder of the support rows modulates the model's layers; no inner
gradient.

    theta_t = diag(scale_t) W, scale_t * b + shift_t    of every layer that adapt_layers names,
    (scale_t, shift_t) = encoder(support rows of t),    (scale_0, shift_0) = encoder(no rows),
    min over theta and the encoder of  mean_t (1 - c) L_query,t(theta_t) + c L_query,t(theta_0)

with c = cold_weight, so that a task without support is predicted well, too. In the spirit of TaNP
(Lin et al., "Task-adaptive Neural Process for User Cold-Start Recommendation", arXiv 2103.06137),
whose modulation is also made of a permutation-invariant code of the support. Departures: no latent
variable and no clusters of tasks (CBML has these); besides its label a row tells its error, the
label minus what theta_0 predicts; one model of any kind is
modulated, not a decoder of its own. All gradients are ordinary ones of the equations above, also
through the errors. Embedding rows do not adapt, whatever adapt_embeddings says.

`encoder_maml` takes MAML's inner steps from theta_t on (adapt_layers and adapt_embeddings as
there): gates from the encoder, the rest by gradient, as in CBML with its clusters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.adaptation.adaptation_plan import adaptable_layers
from gmeta.adaptation.algorithms.algorithm import Algorithm, without_embeddings
from gmeta.adaptation.learned_parts import LearnedParts
from gmeta.config.algorithm import EncoderOptions
from gmeta_models.support_encoder import SupportEncoder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gmeta.adaptation.algorithms.algorithm import TableSizes
    from gmeta.adaptation.general_loop import GeneralLoop
    from gmeta.adaptation.layout.sides import Sides, WorkingRows
    from gmeta.config.algorithm import AlgorithmConfig


def cold_and_query_loss_sum(inner_loop: GeneralLoop, rows: WorkingRows, tasks: Sides) -> Tensor:
    """Return the sum over the tasks of the mean query loss, with and without their support: a
    scalar.
    """
    share = inner_loop.config.options_of(EncoderOptions).cold_weight
    adapted = inner_loop.adapt(rows, tasks, second_order=True)
    loss_sum = inner_loop.query_loss_sum(adapted, tasks) * (1.0 - share)
    if not share:
        return loss_sum
    unadapted = inner_loop.unadapted(rows, tasks.query)
    return loss_sum + inner_loop.query_loss_sum(unadapted, tasks) * share


def support_encoder(model: nn.Module, config: AlgorithmConfig, tables: TableSizes) -> LearnedParts:
    """Return an encoder for the layers that the config names.

    Raises:
        ValueError: it names none, or the learner was not told of the columns.
    """
    layers = adaptable_layers(model, config.adapt_layers)
    if not layers:
        raise ValueError(
            f'algorithm.adapt_layers = [] with algorithm.name = "{config.name}": the encoder makes '
            'gates for the layers named there. Name some, or "*" for all'
        )
    sizes = tables.inputs
    width = sizes.side_by_side(tables.width)
    if not width:
        raise ValueError(
            f'algorithm.name = "{config.name}" reads the support rows, and 0 columns are known: '
            "tell the learner their TableSizes, as gmeta.runs.build.build_learner does"
        )
    options = config.options_of(EncoderOptions)
    encoder = SupportEncoder(
        width,
        options.encoder_hidden,
        {name: layer.out_features for name, layer in layers.items()},
        attention=options.encoder_pooling == "attention",
        shifts=options.encoder_modulation == "film",
        prior=config.support_prior,
    )
    return LearnedParts(encoder=encoder)


ENCODER = Algorithm(
    cold_and_query_loss_sum, preset=without_embeddings, parts=support_encoder, takes_steps=False
)
ENCODER_MAML = Algorithm(cold_and_query_loss_sum, parts=support_encoder)
