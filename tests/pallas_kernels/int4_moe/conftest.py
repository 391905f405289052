import os

# The interpreter runs every warpgroup as a thread of XLA's pool and blocks it on barriers: with as many threads as a
# small machine has cores it starves. Read when the CPU client starts, so before the first device is touched.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("PJRT_NPROC", "32")
