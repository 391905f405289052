import os

# The interpreter runs every simulated warp and warpgroup on a thread of XLA's pool and blocks it on barriers: with as
# many threads as a small machine has cores it starves. Read when the CPU client starts, so set before that.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("PJRT_NPROC", "32")
