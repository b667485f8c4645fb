"""Remote calls from the driver to groups of ranks, with queues, time limits, failures and hang reports."""
