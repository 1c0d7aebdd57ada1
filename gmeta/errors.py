"""The engine's error tree, and which errors a user can mend."""

DISK_FAILS = "The disk, or what leads to it, fails: look into the system's log"


class GMetaError(Exception):
    """Base of every error that gmeta raises on purpose."""

    # The command line prints the error as one line and exits with this code.
    exit_code = 1


class NotFiniteError(GMetaError):
    """A model, or what it computes of rows, holds a value that is not finite."""

    # The exit code of a failed verdict, too.
    exit_code = 3


class NotWrittenError(GMetaError):
    """A disk is full or fails; made of what was not written, and of what to do."""

    def __str__(self) -> str:
        return ". ".join(self.args)


class UserError(GMetaError):
    """Something that the user can mend: a config value, a path, an option."""

    exit_code = 2


class ConfigError(UserError):
    """A training config is wrong: an unknown key, a bad value, a contradiction."""


def is_of_memory(error: Exception) -> bool:
    """Return whether memory ran out."""
    # torch raises RuntimeError for it; the last text is for a size beyond 64 bits.
    texts = ("out of memory", "allocate memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(one in str(error) for one in texts)
