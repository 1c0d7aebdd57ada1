"""How the rows of many tasks are laid out for the inner loops."""
