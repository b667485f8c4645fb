"""The journal of agents' attempts: the file `attempts.journal` in a run folder."""
