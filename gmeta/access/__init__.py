"""Who may call a server, and how servers log: TLS, tokens, roles, rate limits."""
