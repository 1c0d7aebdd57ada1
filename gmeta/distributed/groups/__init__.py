"""Two levels of network: tables sharded inside groups of ranks, with a copy in each group."""
