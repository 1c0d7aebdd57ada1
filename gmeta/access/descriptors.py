"""How many files and connections a process may have open."""

import resource


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the limit as far as `wanted` and allowed; return how far that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard < 0 else min(wanted, hard)  # below 0: there is none
    if 0 <= soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
