"""One command for the first minutes on a GPU: the card, the kernels' values and times, a round, a text; verdicts."""
