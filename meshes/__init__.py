"""Machines and layouts: what the hardware is and how the mesh axes lie on it."""
