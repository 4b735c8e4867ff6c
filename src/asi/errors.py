"""The errors that a caller may want to catch.

AsiError                 every error that the input, the configuration or the disk can cause
├── ConfigError          a setting is unknown, out of range or contradicts another
├── DataError            a document, query or judgement can't be used: names file, line and remedy
├── StoreError           the store is missing, locked, damaged or made by another model
├── CheckpointError      a saved model is missing, incomplete, damaged or does not fit
└── Interrupted          a run was asked to stop; it has saved its state and can be resumed
"""


class AsiError(Exception):
    """Base of all errors with a message meant for a person: what is wrong, where, what to do."""


class ConfigError(AsiError): ...


class DataError(AsiError): ...


class StoreError(AsiError): ...


class CheckpointError(AsiError): ...


class Interrupted(AsiError): ...


def one_line(error: Exception) -> str:
    """What went wrong, for a table or a message; with the kind of an error that was not meant for a person."""
    return str(error) if isinstance(error, AsiError) else f"{type(error).__name__}: {error}"
