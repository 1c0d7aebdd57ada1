"""A run: its folder, what it tells while it trains, how far it has come."""
