"""Who may call what, how often, and how callers and addresses are recognised."""
