import pytest

from meshes import GPUS, TARGETS, gpu, target


def test_published_figures():
    # One way and per GPU: NVLink 5 is sold as 1.8 TB/s both ways, NDR as 400 Gb/s.
    assert gpu("GB300").nvlink_bytes_per_s == 900e9
    assert gpu("h200").nvlink_bytes_per_s == 450e9
    assert gpu("h200").network_link.bytes_per_s == 400e9 / 8
    assert gpu("b300").network_link.bytes_per_s == 800e9 / 8
    assert gpu("rtx-pro-6000").nvlink_bytes_per_s == 0
    assert gpu("rtx-pro-6000").local_link.bytes_per_s == 64e9
    assert gpu("b300").hbm_bytes == pytest.approx(288.4e9, rel=1e-3)


def test_every_gpu_names_its_sources():
    for card in GPUS.values():
        assert card.source
        assert card.local_link.source
        assert card.network_link.source


def test_unknown_gpu_is_refused_with_the_choice():
    with pytest.raises(ValueError, match=r"unknown GPU 'a100'.*h100.*rtx-pro-6000"):
        gpu("a100")


def test_target_texts_come_from_the_table():
    text = target("gb300")
    assert 'name: "NVIDIA GB300"' in text
    assert "core_count: 152" in text
    assert "memory_bandwidth: 7928064000000" in text
    assert "major: 10 minor: 3" in text
    assert set(TARGETS) < set(GPUS)
    with pytest.raises(ValueError, match="not a compile target"):
        target("rtx-pro-6000")
