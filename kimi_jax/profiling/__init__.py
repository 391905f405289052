"""Compiling for a cluster without it, and reading the compiled program."""
