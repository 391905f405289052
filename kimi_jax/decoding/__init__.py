"""Prefill, rounds of decoding and sampling as compiled programs."""
