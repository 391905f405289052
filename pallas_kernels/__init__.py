"""Pallas Mosaic GPU kernels; every operation with a reference that runs anywhere."""
