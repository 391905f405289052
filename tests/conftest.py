"""One JAX configuration for every test: 72 simulated CPU devices, enough for every preset, set before any test module touches JAX."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax

jax.config.update("jax_num_cpu_devices", 72)
