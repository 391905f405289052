import os

# The interpreter runs every simulated warp and warpgroup on a thread of XLA's pool and blocks it on barriers: with as
# many threads as a small machine has cores it starves. Read when the CPU client starts, so set before that.
os.environ.setdefault("NPROC", "16")
# Up to 72 simulated devices block one each besides, while the rank before them is in the interpreter.
os.environ.setdefault("PJRT_NPROC", "160")
# Simulated ranks take turns in the interpreter (test_in_model.py); the first may wait long for the last at a sum, where
# XLA would end the process after 40 seconds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_warn_stuck_timeout_seconds=1200"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=1800"
)
