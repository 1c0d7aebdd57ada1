"""Imported first by the server that processes are forked from: nothing that it imports is garbage,
and looking for some among a million new objects took a quarter of its start. Whoever is forked
collects again: see gmeta.commands.on_ranks.importing and gmeta.loop.looked_up.
"""

import gc

gc.disable()
