"""Imported last of what stages find imported: hides a million objects from the garbage collections
of the stages, which would walk over them, and write to the memory that they share, again and again.
"""

import gc

gc.collect()
gc.freeze()
