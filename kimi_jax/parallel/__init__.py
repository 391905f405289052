"""Sharding rules, collectives and expert exchanges."""
