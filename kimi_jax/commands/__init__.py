"""The commands of `kimi-jax`, one module each; `scripts/` has a file for each that calls it from a checkout."""
