"""Child processes: supervised ones, pools of them, and fork servers."""
