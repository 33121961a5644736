"""A pretended accelerator in pure Python, which tests device discipline without a GPU.

Its tensors lie on `pretend:0`. They compute what the CPU computes, bit for bit, but refuse to meet
the CPU's tensors where CUDA's refuse, and every copy between the devices can be counted:

    with pretend_device() as device, count_copies() as copies:
        x = torch.ones(3, device=device)
        x.mul_(torch.tensor(2.0))  # allowed, as on CUDA: the CPU's tensor has no dimension
        x.sum().item()             # allowed; `copies` names the operation, the way and the line
        x + torch.ones(3)          # RuntimeError, which names the same

What differs from CUDA: arithmetic has the CPU's bits, random draws on the device come from the
CPU's stream, and the device has no streams, pinned memory, autocast or generators. A recurrent
network is computed by the CPU's kernel.

- rules.py: what is refused, and how an error names the line.
- copies.py: what is counted.
- tensors.py: the tensors and the device.
"""

from __future__ import annotations

from pretend_device.copies import Copies, Copy, count_copies
from pretend_device.tensors import PretendTensor, pretend_device

__all__ = ["Copies", "Copy", "PretendTensor", "count_copies", "pretend_device"]
