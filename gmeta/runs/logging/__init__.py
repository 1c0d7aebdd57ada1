"""What follows a run while it trains: loggers, which write its readings down, and callbacks."""
