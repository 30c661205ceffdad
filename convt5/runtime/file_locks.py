"""Files and folders that one process at a time may write."""

import fcntl
from typing import IO, Any


def lock(file: int | IO[Any]) -> bool:
    """Locks an open file or folder for as long as it is open; however a process ends, locks vanish.

    Returns:
        False where another process holds it. True also on file systems without locks, where that
        cannot be known.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
