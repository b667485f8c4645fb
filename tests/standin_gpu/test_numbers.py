"""torch's CUDA build on the stand-in: its numbers are those of the CPU, and each misuse has an error that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.standin_gpu


def grid(device: str) -> Tensor:
    """Return [3, 4] float32 values whose order is visible: 0, 1, 2 and so on."""
    return torch.arange(12.0, device=device).view(3, 4)


def trained(device: str) -> Tensor:
    """Return the loss [] after five steps of Adam with clipped gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    inputs = torch.arange(8.0).view(2, 4).to(device)
    loss = torch.zeros(())
    for _ in range(5):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), torch.tensor([0, 1], device=device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.detach()


def written_view(device: str) -> Tensor:
    values = torch.arange(6.0, device=device)
    values[1:3].mul_(5)
    return values


def attention(device: str) -> Tensor:
    q = grid(device)[None]
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


COMPUTATIONS: dict[str, Callable[[str], Tensor]] = {
    "matmul": lambda device: grid(device) @ grid(device).t(),
    "bfloat16 linear": lambda device: functional.linear(grid(device).bfloat16(), grid(device).bfloat16()),
    "transposed copy": lambda device: grid(device).t().contiguous(),
    "softmax": lambda device: grid(device).softmax(-1),
    "index": lambda device: grid(device)[torch.tensor([2, 0], device=device)],
    "index on the CPU": lambda device: grid(device)[torch.tensor([2, 0])],
    "mask": lambda device: grid(device)[grid(device) % 3 == 0],
    "sort": lambda device: (-grid(device)).flatten().sort().values,
    "attention": lambda device: attention(device),
    "out= of another shape": lambda device: torch.add(grid(device), 2, out=torch.empty(0, device=device)),
    "written view": written_view,
    "list of tensors": lambda device: torch.ops.aten._foreach_add.List([grid(device)], [grid(device)])[0],
    "random": lambda device: torch.randn(5, device=device),
    "training": trained,
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_numbers_are_those_of_the_cpu(name: str) -> None:
    torch.manual_seed(7)
    expected = COMPUTATIONS[name]("cpu")
    torch.manual_seed(7)
    found = COMPUTATIONS[name]("cuda")
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def test_tensors_of_the_second_device_lie_there() -> None:
    before = torch.cuda.mem_get_info(1)[0]
    values = torch.ones(1 << 20, device="cuda:1")
    assert (values + 1).device == torch.device("cuda:1")
    assert torch.cuda.memory_allocated(1) >= values.nbytes
    assert before - torch.cuda.mem_get_info(1)[0] >= values.nbytes


def test_two_devices_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"two devices, cuda:0 and cuda:1! \(stand-in, aten::add\.Tensor\)"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


def test_cpu_and_cuda_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"two devices, cuda:0 and cpu! \(stand-in, aten::mul\.Tensor\)"):
        torch.ones(2, device="cuda") * torch.ones(2)


def test_a_number_of_the_host_may_be_an_operand() -> None:
    assert (torch.ones(2, device="cuda") * torch.tensor(3.0)).tolist() == [3, 3]


def test_an_operand_past_its_storage_is_an_error() -> None:
    values = torch.ones(8, device="cuda")
    view = values[:]
    values.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"illegal memory access.*aten::add.* uses 32 bytes of a storage of 0"):
        view + 1


def test_a_kernel_without_imitation_is_an_error() -> None:
    query = torch.ones(1, 1, 16, 16, device="cuda")
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION),
        pytest.raises(RuntimeError, match=r"AttentionKernel.* is not imitated.*rollout\.vllm\.enforce_eager=true"),
    ):
        functional.scaled_dot_product_attention(query, query, query)
