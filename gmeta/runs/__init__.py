"""A run: its folder, what it reports while it trains, how far it has come."""
