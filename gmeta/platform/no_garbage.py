"""Imported first by the server that processes are forked from: nothing that it imports is garbage,
and looking for some among a million new objects took a quarter of its start. Whoever is forked
collects again: see gmeta.cli.commands.rank_launch.importing and gmeta.pipeline.preload_last."""

import gc

gc.disable()
