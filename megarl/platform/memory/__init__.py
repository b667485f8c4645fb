"""Memory of this process and its machine: sizes, peaks, page-locked and shared memory, torch's GPU allocator."""
