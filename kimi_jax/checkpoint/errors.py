"""The error of everything that reads or writes checkpoints; in a module of its own, which imports nothing."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or written, with the file, the tensor and the cause."""
