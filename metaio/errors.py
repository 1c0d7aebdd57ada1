"""The one error tree of metaio: what a caller may catch, and what the command line prints as one
line.

Every message has four parts: what is wrong, the value, what is allowed, what to do.
"""


class MetaIOError(Exception):
    """Base of every error that metaio raises on purpose."""


class SchemaError(MetaIOError):
    """The dataset description (TOML) is wrong, or the data does not fit it."""


class DataError(MetaIOError):
    """A raw input cannot be turned into episodes: a null, a wrong type, an empty file."""


class UrlError(MetaIOError):
    """A URL names a place that this installation cannot reach."""


class NoDatasetError(MetaIOError):
    """There is no prepared dataset at the given place."""


class FormatError(MetaIOError):
    """A prepared dataset cannot be read: a missing, truncated, altered or too new file."""


# Of a dataset whose files are damaged.
REMEDY = (
    "Copy the dataset again or prepare it again; gmeta inspect --verify lists every damaged file"
)
