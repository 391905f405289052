"""Kimi K2.6 on NVIDIA GPUs from JAX."""
