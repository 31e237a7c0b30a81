"""The one error family for mistakes a user can mend: printed as one line, without a traceback."""


class UserError(Exception):
    """What was given, what is allowed, what to do. `exit_code` is what the process ends with."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, a ds config or a flag is wrong (exit code 2)."""


class DataError(UserError):
    """Images are missing, unreadable or too few (exit code 2)."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or of another run (exit code 3)."""

    exit_code = 3


class NumericError(UserError):
    """Training stopped because its numbers went wrong: NaN/Inf loss or loss scale at its minimum (exit code 4)."""

    exit_code = 4


class StorageError(UserError):
    """The disk is full or can't be written to (exit code 5)."""

    exit_code = 5


class PeerError(UserError):
    """A rank hangs or is gone (exit code 6)."""

    exit_code = 6
