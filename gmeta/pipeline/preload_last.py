"""Runs last in the fork server: looks up once what every stage needs."""

import gc

from gmeta.metrics.custom_metrics import NAMED_METRICS
from gmeta.runs.environment import package_versions

# One look for entry points finds those of all kinds.
NAMED_METRICS.names()
package_versions()
# A stage that collects would walk over a million objects, and write to the memory that stages
# share.
gc.collect()
gc.freeze()
gc.enable()
