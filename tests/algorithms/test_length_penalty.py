import torch

from megarl.algorithms.advantages import soft_overlong


def test_the_penalty_falls_off_in_the_buffer():
    lengths = torch.tensor([0, 60, 80, 85, 90, 100, 120])
    assert soft_overlong(lengths, longest=100, buffer=20).tolist() == [0, 0, 0, -0.25, -0.5, -1, -1]
