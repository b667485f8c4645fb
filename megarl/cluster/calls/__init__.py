"""Remote calls from the driver to groups of ranks: their queues, time limits, failures and hang reports."""
