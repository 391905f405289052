"""Logits, perplexity, tasks and the lm-eval adapter."""
