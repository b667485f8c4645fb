"""Agents: one process per node that forks ranks, relays calls and holds copies of their state."""
