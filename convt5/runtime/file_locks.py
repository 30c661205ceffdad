"""Locks for files and folders that only one process may write."""

import fcntl
from typing import IO, Any


def lock(file: int | IO[Any]) -> bool:
    """Locks an open file or folder until it is closed or the process ends.

    Returns:
        False if another process holds the lock. Also True on file systems without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
