"""The study of docs/cluster_scaling.md: its text, the analysis it began with, and predictions of published runs."""
