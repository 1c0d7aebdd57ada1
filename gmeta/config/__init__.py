"""What decides a run's config: each section's keys, how TOML is read, how it is resolved."""
