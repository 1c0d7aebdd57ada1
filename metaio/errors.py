"""The error tree of metaio: what callers catch, and what the command line prints as one line.

Every message has four parts: what is wrong, the value, what is allowed, what to do."""

from collections.abc import Sequence


class MetaIOError(Exception):
    """Base of every error that metaio raises on purpose."""


class SchemaError(MetaIOError):
    """The dataset description (TOML) is wrong, or the data does not fit it."""


class DataError(MetaIOError):
    """A raw input cannot be turned into episodes: a null, a wrong type, an empty file."""


class QuarantinedError(DataError):
    """The rows of a window are refused for what they hold; the stream goes on without them."""


# A class of its own, since nothing is wrong with such files: together with others they may make
# episodes, so a stream keeps them for its next increment.
class TooFewRowsError(DataError):
    """Inputs hold no rows, or too few for an episode; `files` are those known to hold none."""

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.files = files


class MissingColumnError(DataError):
    """An input lacks a column of the schema."""


# A class of its own, since the same input may be read later: it must not be quarantined.
class AccessError(DataError):
    """An input cannot be read now, whatever it holds: a path, disk, network or memory failed."""


class UrlError(MetaIOError):
    """A URL names a place that this installation cannot reach."""


class NoDatasetError(MetaIOError):
    """There is no prepared dataset at the given place."""


class FormatError(MetaIOError):
    """A prepared dataset cannot be read: a missing, truncated, altered or too new file."""


# What to do about a dataset whose files are damaged.
REMEDY = (
    "Copy the dataset again or prepare it again; gmeta inspect --verify lists every damaged file"
)


def to_one_line(text: str, most: int = 800) -> str:
    """Return `text` as one printable line of at most `most` characters, whatever it held."""
    # Names and messages come from files of others: escapes could control the terminal.
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])
    return line if len(text) <= most else f"{line} ..."


def make_content_error(what: str) -> FormatError:
    """Return the error about a file whose checksum is right but whose content makes no sense."""
    return FormatError(
        f"{to_one_line(what)}. The program that wrote it is at fault; see docs/format.md"
    )
