"""Requests that come and go: the host's decisions as plain Python, which touches no device."""
