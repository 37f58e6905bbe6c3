"""Write a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write text beside its place and move it there, so that nobody ever sees half a file.

    Raises:
        OSError: the place cannot be written; what was there before is left as it was.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # a device or a pipe is written to, a folder raises
        path.write_text(text, encoding="utf-8")
        return
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(beside, _mode(path))
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int:
    """Return the permissions that the file has, or that a new one would get."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
