"""Imported last of all that stages find imported: looks up once what every stage would look up, and
hides a million objects from their garbage collections, each of which would walk over them and write
to the memory that stages share.
"""

import gc

from gmeta.metrics.own import NAMED_METRICS
from gmeta.runs.environment import package_versions

NAMED_METRICS.names()  # entry points: of all kinds at once
package_versions()
gc.collect()
gc.freeze()
gc.enable()
