"""Host memory of a rank: its page-locked arena, tensors that leave the device, and an optimizer that works on it."""
