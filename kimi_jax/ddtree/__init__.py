"""The draft tree: building it, choosing its size, walking it."""
