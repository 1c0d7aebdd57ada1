"""What the processes of tests find imported when they are forked: also what a rank imports only
when it is needed, each of it some tenths of a second that every rank would spend again."""

# ruff: noqa: E402, F401
import gc
import platform
from contextlib import suppress

gc.disable()  # it would look for garbage among a million new objects, again and again

import duckdb
import fsspec.implementations.local
import hypothesis
import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg
import optuna
import pyarrow.dataset
import pytest
import rich.emoji
import tensorboard.plugins.hparams.api_pb2
import tensorboard.plugins.hparams.metadata
import torch.distributed.launcher.api
import torch.profiler
import torch.utils.serialization
import torch.utils.tensorboard

with suppress(ImportError):  # not in older releases
    import fsspec.implementations.chained
with suppress(ImportError):  # an extra
    import lightgbm

import gmeta.cli.commands.evaluate
import gmeta.cli.commands.export
import gmeta.cli.commands.extend_stream
import gmeta.cli.commands.inspect
import gmeta.cli.commands.prepare
import gmeta.cli.commands.train
import gmeta.cli.commands.tune
import gmeta.cli.commands.work.channel_changes
import gmeta.cli.commands.work.evaluation_rank
import gmeta.cli.commands.work.model_export
import gmeta.cli.commands.work.training_rank
import gmeta.cli.commands.work.trial_process
import gmeta.cli.main
import gmeta.pipeline.stage_process
import gmeta.serving.server.server_processes
import gmeta.serving.server.server_worker
import gmeta.training
import tests.distributed.harness
import tests.support.forked
from gmeta.metrics.custom_metrics import NAMED_METRICS
from gmeta.runs.environment import package_versions
from tests.support.processes import collapse_memory, collect_garbage_rarely

# What every rank would look up, each of it once.
rich.emoji.Emoji.replace(":heart:")  # reads the names of all
NAMED_METRICS.names()
package_versions()
platform.platform()

collect_garbage_rarely()
collapse_memory()
