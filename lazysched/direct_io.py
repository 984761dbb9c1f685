"""Files past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os


def turn_on_direct(descriptor: int, view: memoryview) -> bool:
    """Switch a file to direct I/O; False where its file system refuses, at once or at the first write.

    Args:
        descriptor: of the file, open for writing; ``view`` is written to its beginning.
        view: whole pages that begin on a page.

    Raises:
        OSError: it cannot be written at all.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(descriptor, [view], 0)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        os.pwritev(descriptor, [view], 0)
        return False
    return True
