"""The journal of agents' attempts, `attempts.journal` in a run folder."""
