"""The subcommands of `gmeta`, one file each; only here does the project print."""
