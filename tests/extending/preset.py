"""Two NVL72 racks joined by InfiniBand."""

from meshes.presets import NVL_GPUS, PRESETS, Layout, Preset
from meshes.topology import Topology

PRESETS["nvl144"] = Preset(
    "nvl144", Topology(num_gpus=144, gpus_per_node=4, gpus_per_domain=72), Layout(dp=2, ep=9, tp=8), NVL_GPUS
)
