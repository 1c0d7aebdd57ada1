"""The work of commands that need torch: imported once the options are known to be right."""
