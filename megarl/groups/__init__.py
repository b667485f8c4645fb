"""Process groups of torch and Megatron: signed collectives, rendezvous, groups across worlds, and lost peers."""
