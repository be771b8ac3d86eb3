"""Say which modes there are, and on how many IPUs each network can run in them. Nothing here imports jax."""

from typing import Final, Literal, get_args

from mnist_example.checks import check_choice, check_count

CLASSES: Final = 10

Mode = Literal["basic", "concurrent"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

Depth = Literal[18, 50]
DEPTHS: Final[tuple[Depth, ...]] = get_args(Depth)

RESNET_BLOCKS: Final[dict[Depth, tuple[int, ...]]] = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
"""The number of blocks with 64, 128, 256 and 512 channels."""


def check_mlp_ipus(mode: Mode, ipus: int) -> None:
    """Raise for a number of IPUs that the mode cannot use, whatever the number of devices is.

    Raises:
        ValueError: an unknown mode, a number below 1, a number other than 2 in basic mode, or more IPUs than classes.
    """
    check_choice("mode", mode, MODES)
    check_count("ipus", ipus)
    if mode == "basic" and ipus != 2:
        raise ValueError(f"ipus={ipus}, but basic mode has a part for each of 2 IPUs: use 2, or concurrent mode")
    _check_classes(ipus)


def check_resnet_ipus(depth: Depth, mode: Mode, ipus: int) -> None:
    """Raise for a number of IPUs that the network cannot use, whatever the number of devices is.

    Raises:
        ValueError: an unknown mode, a number below 1, more IPUs than layers, or, in concurrent mode, more than classes.
    """
    check_choice("mode", mode, MODES)
    check_count("ipus", ipus)
    # stem and blocks, and in basic mode also the head, which in concurrent mode is on all IPUs
    pieces = 1 + sum(RESNET_BLOCKS[depth]) + (mode == "basic")
    if ipus > pieces:
        raise ValueError(
            f"ipus={ipus}, but resnet{depth} has {pieces} layers to place in {mode} mode: use {pieces} IPUs at most"
        )
    if mode == "concurrent":
        _check_classes(ipus)


def _check_classes(ipus: int) -> None:
    if ipus > CLASSES:
        raise ValueError(f"ipus={ipus}, but there are {CLASSES} classes to split: use {CLASSES} IPUs at most")
