"""One rank's part in reshards: plans, copies, and checks of the copied weights."""
