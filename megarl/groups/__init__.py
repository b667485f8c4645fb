"""Process groups of torch and Megatron: signed collectives, rendezvous, groups across torch worlds, and lost peers.

A world is the set of ranks of one `torch.distributed` initialisation. The trainers are one world; each separate engine
replica is another.
"""
