"""The command line: `gmeta`."""
