"""How exactly matrix products are computed: rounded to bfloat16 where the hardware does that at twice the speed."""

from functools import lru_cache

import torch

NATIVE = ("avx512_bf16", "amx_bf16")  # what a CPU that computes in bfloat16 has; others only imitate it


@lru_cache
def computes_bfloat16(device_type: str) -> bool:
    """Whether products in bfloat16 are faster than in float32 on this hardware."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and any(torch.cpu.get_capabilities().get(name, False) for name in NATIVE)


def products(precision: str, device: torch.device) -> torch.autocast:
    """A context for the products of layers: their inputs in bfloat16, everything between them in float32.

    `precision` is that, "float32", or "auto" for what is faster here.
    """
    rounded = computes_bfloat16(device.type) if precision == "auto" else precision == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=rounded)
