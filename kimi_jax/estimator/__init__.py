"""What a layout costs: step time, memory and throughput of K2.6 on a cluster, from constants with sources."""
