"""Flax modules of the K2 family's language model."""
