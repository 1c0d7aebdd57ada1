"""What a schema says of a log's columns: its TOML, its rules, checks of both."""
