"""The kernels' PTX as a test: an emulator in NumPy, and what it is run on. docs/kernels.md says what it has shown."""
