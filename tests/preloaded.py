"""What the processes of tests find imported when they are forked: also what a rank imports only
when it is needed, each of it some tenths of a second that every rank would spend again.
"""

# ruff: noqa: F401
import pyarrow.dataset
import torch.distributed.launcher.api
import torch.distributed.optim
import torch.profiler
import torch.utils.tensorboard
import torchrec.optim.apply_optimizer_in_backward

import gmeta.cli
import gmeta.commands.evaluate
import gmeta.commands.train
import gmeta.train
import tests.distributed.harness
import tests.forked
