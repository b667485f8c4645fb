"""Containers for agent programs: one for each attempt, on any node, with limits, a network policy and a lease."""
