"""What the supervisor and its commands tell a user, as types. One message, one exit code, no traceback."""

EXIT_OK = 0  # finished, or stopped by SIGINT / SIGTERM
EXIT_FATAL = 1  # could not start, or could not go on
EXIT_USAGE = 2  # a wrong command line
EXIT_NO_FLEET = 3  # ctl found no running fleet
EXIT_FAILED = 4  # the fleet refused the operation or could not finish it


class UserError(Exception):
    """Something a user can put right. `str(error)` names the thing, the value and the way out."""

    def __init__(self, message: str, exit_code: int = EXIT_FATAL) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(UserError):
    """The command line itself is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


class ConfigError(UsageError):
    """The configuration file, or what it points to, is wrong."""


class ModelError(UserError):
    """A model specification that names nothing that can be served."""


class PullError(UserError):
    """A model could not be fetched."""


class PortError(UserError):
    """The HTTP address cannot be listened on."""


class NoFleet(UserError):
    """No fleet is running, or not the one that was named."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_NO_FLEET)


class OperationFailed(UserError):
    """The fleet answered a control call with something other than ok."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_FAILED)
