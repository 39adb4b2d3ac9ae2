"""The arithmetic peak of GPUs by the name that their driver gives, for the model FLOPs utilisation (MFU).

Pure: a table and a look-up; torch is not needed. The participant asks for the card it computes on, tests and
benchmarks for the one that a config names.
"""

import re

# FLOP/s of dense matrix products of bf16 that are summed in fp32 (of fp16 where a card has no bf16), without
# sparsity. From the vendors' data sheets, and for the cards of the GeForce and RTX series from the appendices of
# the architectures' white papers (Ampere GA102, Ada, Blackwell RTX); a data sheet that gives the figure with 2:4
# sparsity is halved. The first pattern that fits counts.
PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"GH200", 989.4e12),
    (r"H200 NVL", 835.5e12),
    (r"H200", 989.4e12),
    (r"H100 PCIe", 756e12),
    (r"H100 NVL", 835.5e12),
    (r"H100", 989.4e12),  # SXM: "NVIDIA H100 80GB HBM3"
    (r"A100", 312e12),
    (r"A40", 149.7e12),
    (r"A30", 165e12),
    (r"A10G", 70e12),
    (r"A10", 125e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"T4", 65e12),  # fp16
    (r"V100S?-PCIE", 112e12),  # fp16
    (r"V100", 125e12),  # fp16
    (r"RTX A6000", 154.8e12),
    (r"RTX 6000 Ada", 364.2e12),
    (r"RTX 3090 Ti", 80e12),
    (r"RTX 3090", 71e12),
    (r"RTX 4090", 165.2e12),
    (r"RTX 5090", 209.5e12),
    (r"MI300X", 1307.4e12),
    (r"MI325X", 1307.4e12),
)
# A part of a card, and cards that share a name with a faster one.
OTHERS = re.compile(r"\b(MIG|Laptop|Max-Q|Mobile|D)\b")


def peak_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s of the GPU of that name, as `torch.cuda.get_device_name` says it; None: not known."""
    if OTHERS.search(name):
        return None
    return next((peak for pattern, peak in PEAKS if re.search(rf"\b{pattern}\b", name)), None)
