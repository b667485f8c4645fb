"""Agents: one process per node that forks ranks, relays their calls and holds copies of their state."""
