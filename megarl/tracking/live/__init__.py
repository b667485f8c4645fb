"""The present state of a run, for other programs: status.json, and metrics for Prometheus."""
