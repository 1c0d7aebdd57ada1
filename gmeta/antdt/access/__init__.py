"""Who may call what, how often, and how a caller and an address are told."""
