"""HTTP routes of the training service, and the accounts of their callers."""
