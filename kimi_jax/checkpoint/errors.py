"""The error of everything that reads or writes checkpoints, and the mark of those that are not finished."""

from pathlib import Path

UNFINISHED_SUFFIX = ".incomplete"
"""End of a folder's name until the folder is complete."""
UNFINISHED_NAME = "INCOMPLETE"
"""File of a folder until it is complete, whatever the folder is called."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or written, with the file, the tensor and the cause."""


def require_finished(directory: Path) -> None:
    """Refuses a checkpoint or drafter folder whose writing was cut, or goes on.

    Raises:
      CheckpointError: naming the folder.
    """
    marker = directory / UNFINISHED_NAME
    if marker.exists() or (directory.name.endswith(UNFINISHED_SUFFIX) and directory.is_dir()):
        what = f"{marker} says that" if marker.exists() else f"{directory}: its name says that"
        raise CheckpointError(f"{what} the folder was never finished; parts of it are blank, so write it again")
