"""Switches garbage collection off; the server that processes are forked from imports it first."""

# Nothing that the server imports is garbage, and looking for some among a million new objects took
# a quarter of its start. Forked processes collect again: see
# gmeta.cli.commands.rank_launch.importing and gmeta.pipeline.preload_last.
import gc

gc.disable()
