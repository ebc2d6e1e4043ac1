"""What the errors of redis-py mean."""

from refold.core.errors import SettingError

try:
    import redis
    from redis import exceptions
except ModuleNotFoundError as error:
    raise SettingError("redis://", 'needs redis-py: pip install "refold[redis]"') from error

ERRORS = (redis.RedisError, exceptions.RedisClusterException)
REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError)
TEMPORARY = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,  # and MASTERDOWN
)
TEMPORARY_PREFIXES = ("BUSY ", "NOREPLICAS", "UNBLOCKED")


def is_broken(error: Exception) -> bool:
    """The connection, or a node of the cluster, is gone."""
    if isinstance(error, REFUSED):
        return False
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | exceptions.RedisClusterException)


def is_passing(error: Exception, is_cluster: bool) -> bool:
    """The server is there, and can soon do what it refuses now."""
    if isinstance(error, TEMPORARY) or str(error).startswith(TEMPORARY_PREFIXES):
        return True
    return is_cluster and isinstance(error, exceptions.AskError)  # a slot is being moved


def refusal(error: Exception, is_cluster: bool) -> str | None:
    """What the server refuses for good, and what to do; None if it is another kind of error."""
    match error:
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
            return f"refuses the user name or the password: {error}"
        case exceptions.OutOfMemoryError():
            return "is full (maxmemory): nothing was stored. Free memory, raise maxmemory, or lower ttl_s"
        case exceptions.ResponseError() if "WAITAOF" in str(error).upper():
            return f"cannot wait_aof, which needs Redis or Valkey 7.2 and appendonly yes: {error}"
        case exceptions.NoPermissionError():
            return f"does not allow it: {error}"
        case exceptions.AskError() if not is_cluster:
            return "is part of a cluster: add cluster=1 to the URL"
        case exceptions.RedisClusterException() if "not enabled" in str(error):
            return "is not a cluster: leave cluster=1 out of the URL"
        case _:
            return None
