"""Numbers of a step that the host has made, on their way to the device."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """`numbers` on `device`; the host does not wait for the copy. On the CPU they share their memory."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
