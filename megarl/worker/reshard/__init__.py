"""One rank's part in reshards: plans, copies, and checks of what was copied."""
