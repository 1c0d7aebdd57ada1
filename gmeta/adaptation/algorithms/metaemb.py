"""Meta-Embedding: the embedding of a cold id is generated from its content, then warmed up by inner
steps on the id's first labelled rows.

    phi_t = h_w(content of t)                    in place of the id's row in its table
    phi_t' = k steps of  phi <- phi - a grad_phi L_support,t(phi)   from phi_t
    min over w of  mean_t  c L_support,t(phi_t) + (1 - c) L_query,t(phi_t')

with c = cold_weight, the paper's alpha. Pan et al., "Warm Up Cold-start Advertisements: Improving
CTR Predictions via Learning to Learn ID Embeddings", SIGIR 2019 (arXiv 1904.11547), algorithm 1;
second order, as there. Tasks are ids, such as items; adapt_embeddings names the one table, content
the columns that describe its ids. `train_base = false` is the paper: model and tables are those of
a plain run (run.start_from) and the generator alone learns; with true they learn from the same
loss. Departures: k steps where the paper has one; every id is generated, also those of training,
whose rows in the table are not used; layers named in adapt_layers (but for the default) adapt with
the embedding; a task without support rows has no first term, and support_prior shrinks that term as
it shrinks steps.

Every row is given the embedding of its own content: the rows of a task agree, as they describe one
id, and rows of several ids may be predicted at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.learned_parts import LearnedParts
from gmeta.config.algorithm import AlgorithmConfig, MetaEmbOptions
from gmeta_models.id_generator import IdGenerator, content_columns
from gmeta_models.model_config import resolve_pooling

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gmeta.adaptation.algorithms.algorithm import TableSizes
    from gmeta.adaptation.general_loop import GeneralLoop
    from gmeta.adaptation.layout.sides import Sides, WorkingRows


def cold_and_warm_loss_sum(inner_loop: GeneralLoop, rows: WorkingRows, tasks: Sides) -> Tensor:
    """Return the sum over the tasks of the cold loss on the support and the warm one on the query:
    a scalar.
    """
    share = inner_loop.config.options_of(MetaEmbOptions).cold_weight
    adapted = inner_loop.adapt(rows, tasks, second_order=True)
    warm = inner_loop.query_loss_sum(adapted, tasks) * (1.0 - share)
    # The loss before the first step is the one of the generated embedding.
    return sum((loss_sum * share for loss_sum in adapted.support_loss_sums[:1]), warm)


def embedding_alone(model: nn.Module, config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the config with no layer to adapt, unless it names some.

    Raises:
        ValueError: it does not name the one table whose embeddings are generated.
    """
    tables = config.adapt_embeddings
    if isinstance(tables, bool) or len(tables) != 1:
        config_value = str(tables).lower() if isinstance(tables, bool) else list(tables)
        raise ValueError(
            f'algorithm.adapt_embeddings = {config_value} with algorithm.name = "metaemb": it '
            'generates the embeddings of exactly 1 table. Name it, such as ["item"]'
        )
    named = config.adapt_layers != AlgorithmConfig.adapt_layers
    return replace(config, adapt_layers=config.adapt_layers if named else ())


def id_generator(model: nn.Module, config: AlgorithmConfig, tables: TableSizes) -> LearnedParts:
    """Return a generator for the table that the config names.

    Raises:
        ValueError: the table, or the content, is not of columns that the dataset has.
    """
    places = tables.adapting_tables(config)
    assert places is not None  # embedding_alone has seen to it
    (place,) = places
    content = config.options_of(MetaEmbOptions).content
    columns = content_columns(tables.names[place], content, tables.inputs, resolve_pooling(model))
    return LearnedParts(generator=IdGenerator(columns, tables.width), generated_table=place)


META_EMBEDDING = Algorithm(cold_and_warm_loss_sum, preset=embedding_alone, parts=id_generator)
