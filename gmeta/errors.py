"""The engine's error tree, and which errors are the user's to mend."""


class GMetaError(Exception):
    """Base of every error that gmeta raises on purpose; the command line prints it as one line and
    exits with code 1."""

    exit_code = 1


class NotFiniteError(GMetaError):
    """A model holds a value that is not finite: its run diverged. Exit code 3, as of a verdict."""

    exit_code = 3


class NotWrittenError(GMetaError):
    """A disk did not take what a run writes: it is full, or fails. The run is not to blame. Made of
    what was not written, and of what to do."""

    def __str__(self) -> str:
        return ". ".join(self.args)


class UserError(GMetaError):
    """Something that the user can mend: a config value, a path, an option. Exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A training config is wrong: an unknown key, a bad value, a contradiction."""


def is_of_memory(error: Exception) -> bool:
    """Return whether memory ran out; torch says so in a RuntimeError."""
    # The last is said of a size beyond 64 bits.
    told = ("out of memory", "allocate memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(one in str(error) for one in told)
