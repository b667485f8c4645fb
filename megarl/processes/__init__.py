"""Child processes of the driver: supervised processes, pools of them, and fork servers."""
