"""The look of every page: colours, type, tiles, tables and states, in one place."""
