"""The assembler's report, read from its own words."""

import os

from pallas_kernels.assembler import Assembled, caught_output, read

PRINTED = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'int4_gate_up' for 'sm_90a'
ptxas info    : Function properties for int4_gate_up
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 5 barriers, 16 bytes cumulative stack size
ptxas info    : Compiling entry function 'tree_attention' for 'sm_90a'
ptxas info    : Function properties for tree_attention
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 240 registers, used 9 barriers
"""


def test_each_kernel_once():
    expected = (Assembled("int4_gate_up", 168, 16, 4, 8), Assembled("tree_attention", 240, 0, 0, 0))
    assert read(PRINTED + PRINTED) == expected
    assert read("") == ()


def test_what_c_prints_is_caught_and_the_variable_put_back(capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "0")
    with caught_output(True) as caught:
        assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "1"
        os.write(1, b"from the assembler")
    assert caught == ["from the assembler"]
    assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "0"
    os.write(1, b"afterwards")
    assert capfd.readouterr().out == "afterwards"
