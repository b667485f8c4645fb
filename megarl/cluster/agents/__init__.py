"""Agents: one process a node that forks ranks, relays their calls and keeps copies of their state."""
