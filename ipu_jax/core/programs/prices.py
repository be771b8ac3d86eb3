"""Price what B computes again, against a byte that is kept for it, on each kind of chip."""

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Prices:
    """The prices that differ between chips.

    Attributes:
        batched: FLOPs of a batched product that cost as much as a byte. Its result may grow with the square of the
            sequence length, as in attention, and then memory matters more than time.
        free_max: a maximum over fewer bytes costs nothing.
    """

    batched: float
    free_max: int = 0


ON_CPU: Final = Prices(64)
_ON_CHIP: Final = Prices(256)  # while a v5e moves a byte it does 240 FLOPs, an H100 295; a kept byte moves twice
# If nothing else reads a softmax's max, XLA for TPU computes max, exp and sum in one pass. That pays if the scores take
# less than half of the VMEM of 128 MiB. Compiled for v5e and v6e; on a v5p it takes more cycles from 25 MB on.
_ON_LITE_TPU: Final = dataclasses.replace(_ON_CHIP, free_max=2**26)


def prices_on(platform: str, device_kind: str) -> Prices:
    """Return the prices on a device, whose platform and kind are such as "tpu" and "TPU v5 lite".

    >>> prices_on("gpu", "NVIDIA H100 80GB HBM3")
    Prices(batched=256, free_max=0)
    """
    if platform == "cpu":
        return ON_CPU
    return _ON_LITE_TPU if device_kind in ("TPU v5 lite", "TPU v6 lite") else _ON_CHIP
