"""Draw models: any blocks in any stages, on any placement, under any schedule that supports the placement."""

import dataclasses

from random_programs.dice import Dice
from random_programs.model import ROWS, VOCABULARY, Block, Leaf, Loss, Model, Piece

Leaves = tuple[tuple[str, Leaf], ...]

LOCAL: dict[str, float] = {
    "mlp": 4,
    "scan": 5,
    "loop": 1,
    "attention": 2,
    "layer norm": 1,
    "constant": 1,
    "callback": 0.3,
    "exported": 0.3,
    "cond": 1,
    "permutation": 0.7,
    "convolution": 0.7,
    "activation": 1,
}
CONCURRENT: dict[str, float] = {
    "columns": 3,
    "whole": 1,
    "wide": 2,
    "wide norm": 1,
    "wide softmax": 1,
    "wide tokens": 1,
}


SIMPLE_LOCAL: dict[str, float] = {"mlp": 3, "activation": 1}
SIMPLE_CONCURRENT: dict[str, float] = {"columns": 1, "wide": 1}


def draw_model(dice: Dice, *, simple: bool = False, one_ipu: bool = False) -> Model:
    """Return a model of one to eight stages.

    Args:
        dice: the source of all random choices.
        simple: make it fast to compile: few kinds of blocks, all in float32, without skips or state.
        one_ipu: put the whole model on one IPU and freeze nothing, so that a plain function can do the same.
    """
    width = dice.between(4, 7)
    ipus, places = _places(dice)
    if one_ipu:
        ipus, places = 1, [0 for _ in range(dice.between(1, 2))]
    kinds = (SIMPLE_LOCAL, SIMPLE_CONCURRENT) if simple else (LOCAL, CONCURRENT)
    replicas = dice.weighted({1: 3, 2: 1}) if 2 * ipus <= 8 else 1
    mix = dice.weighted({"float32": 6, "bfloat16": 1, "both": 2}) if not simple else "float32"
    tied = places[0] is None and places[-1] is None and len(places) > 1 and dice.chance(0.6)
    pieces: list[Piece] = []
    for i, place in enumerate(places):
        like = [piece for piece in pieces if piece.blocks and (piece.place is None) == (place is None)]
        if like and not tied and dice.chance(0.5) and all(b.d_in == b.d_out == width for b in like[-1].blocks):
            blocks = tuple(dataclasses.replace(b, constant=dice.number()) for b in like[-1].blocks)
        else:
            blocks = tuple(
                _block(dice, kinds, place, width, mix) for _ in range(1 if simple else dice.weighted({1: 5, 2: 2}))
            )
        if tied and i in (0, len(places) - 1):
            blocks = ()
        pieces.append(
            Piece(place, blocks, width=width, recompute=dice.weighted({"auto": 3, "none": 1, "all": 1, "dots": 1}))
        )
    pieces = _widened(dice, pieces)
    pieces[0] = dataclasses.replace(pieces[0], first=_first(dice, pieces[0], tied))
    pieces[-1] = dataclasses.replace(pieces[-1], loss=_loss(dice, pieces[-1], tied, mix))
    pieces = pieces if one_ipu else _extras(dice, pieces, often=0.3 if simple else 1.0)
    pieces, groups = _grouped(dice, pieces, tied, mix, freezes=not one_ipu and dice.chance(0.35))
    return Model(
        tuple(pieces),
        groups,
        width,
        replicas,
        ipus,
        micro_batches=dice.weighted({1: 1, 2: 2, 3: 3, 4: 2, 5: 2, 7: 1}),
        schedule=draw_schedule(dice, tuple(places)),
        reduction=dice.one_of(("mean", "sum")),
        seed=dice.number(),
    )


def draw_schedule(dice: Dice, places: tuple[int | None, ...]) -> str:
    """Return a schedule family that supports the placement; "own" is a random table."""
    names = {"sequential": 1.0, "grouped": 2, "grouped-zb": 2, "interleaved": 1, "gpipe": 1, "1f1b": 2, "zb-h1": 2}
    names["own"] = 3
    runs = [p for i, p in enumerate(places) if p is not None and (i == 0 or places[i - 1] != p)]
    ipus = list(dict.fromkeys(runs))
    if runs and runs == ipus * (len(runs) // len(ipus)):
        names |= {"looped": 2, "looped-bfs": 1, "looped-zb": 2}
    if runs in (ipus + ipus[::-1], ipus + ipus[-2::-1]):
        names |= {"zbv": 3, "zb-wave": 2, "dualpipev": 2}
    return dice.weighted(names)


def _places(dice: Dice) -> tuple[int, list[int | None]]:
    ipus = dice.weighted({1: 1, 2: 4, 3: 3, 4: 3, 5: 0.5, 6: 0.5, 8: 0.5})
    shape = dice.weighted({"line": 4, "folded": 2, "looped": 2, "any": 3, "concurrent": 0.7})
    line = list(range(ipus))
    places: list[int | None]
    if shape == "line":
        places = [ipu for ipu in line for _ in range(dice.weighted({1: 4, 2: 1}))]
    elif shape == "folded":
        there = line[: dice.between(1, min(ipus, 3))]
        places = [*there, *(there[::-1] if dice.chance(0.5) else there[-2::-1])]
    elif shape == "looped":
        places = [*line[: dice.between(1, min(ipus, 3))]] * 2
    elif shape == "any":
        places = [dice.between(0, ipus - 1) for _ in range(dice.between(1, 5))]
    else:
        places = []
    for at in sorted(dice.some_of((0, -1, 1), 0.3 if places else 0.7)):
        places.insert(len(places) if at == -1 else min(at, len(places)), None)
    return ipus, places[:8] or [None]


def _dtype(dice: Dice, mix: str) -> str:
    return dice.one_of(("float32", "bfloat16")) if mix == "both" else mix


def _block(dice: Dice, kinds: tuple[dict[str, float], dict[str, float]], place: int | None, d: int, mix: str) -> Block:
    kind = dice.weighted(kinds[0] if place is not None else kinds[1])
    of = lambda *shape, split=None: Leaf(shape, _dtype(dice, mix), split)
    block = Block(kind, d, d, _dtype(dice, mix), constant=dice.number(), residual=dice.chance(0.5))
    leaves: dict[str, Leaf] = {}
    layers = 1
    if kind in ("mlp", "whole", "columns"):
        split = kind == "columns"
        leaves = {"w": of(d, d, split=1 if split else None), "b": of(d, split=0 if split else None)}
        if dice.chance(0.4):
            leaves["gain"] = of(d)
    elif kind == "scan":
        layers, hidden = dice.between(1, 3), dice.weighted({d: 2, d + 1: 1, 2 * d: 1})
        leaves = {"a": of(layers, d, hidden), "b": of(layers, hidden, d)}
        if dice.chance(0.3):
            leaves["gain"] = of(layers, hidden)
        if dice.chance(0.2):
            leaves["shared"] = of(d, hidden)
        block = dataclasses.replace(
            block, scaled=dice.weighted({"": 2, "a": 1, "b": 1}), remat=dice.chance(0.3), reverse=dice.chance(0.2)
        )
    elif kind == "loop":
        layers, leaves = dice.between(1, 3), {"w": of(d, d)}
    elif kind == "attention":
        leaves = {"pos": of(ROWS + dice.between(0, 2), d), "qkv": of(d, 3 * d), "out": of(2, d, d)}
    elif kind == "layer norm":
        leaves = {"gain": Leaf((d,)), "bias": Leaf((d,))}
    elif kind == "cond":
        leaves = {"w": of(d, d), "gain": of(d)}
    elif kind == "permutation":
        leaves = {"perm": Leaf((d,), "int32", frozen=True), "gain": of(d)}
    elif kind == "convolution":
        leaves = {"w": of(3, d, d)}
    elif kind.startswith("wide"):
        layers = dice.between(1, 9)
        leaves = {"up": of(d, layers, split=1), "up_bias": of(layers, split=0)}
        leaves |= {"down": of(layers, d, split=0), "down_bias": of(d)}
        if kind == "wide norm":
            leaves |= {"gain": Leaf((layers,), split=0), "bias": Leaf((layers,), split=0)}
    return dataclasses.replace(block, leaves=tuple(leaves.items()), layers=layers)


def _widened(dice: Dice, pieces: list[Piece]) -> list[Piece]:
    """Sometimes let a stage that ends with an "mlp" return another width; the next stage returns to the usual width."""
    for i in range(len(pieces) - 1):
        one, two = pieces[i], pieces[i + 1]
        if dice.chance(0.25) and all(p.blocks and p.blocks[0].kind in ("mlp", "columns", "whole") for p in (one, two)):
            last = one.blocks[-1]
            if last.kind not in ("mlp", "columns", "whole") or two.width != two.blocks[0].d_in:
                continue
            d = dice.between(2, 9)
            first = two.blocks[0]
            pieces[i] = dataclasses.replace(one, blocks=(*one.blocks[:-1], _resized(last, last.d_in, d)), width=d)
            pieces[i + 1] = dataclasses.replace(two, blocks=(_resized(first, d, first.d_out), *two.blocks[1:]))
    return pieces


def _resized(block: Block, d_in: int, d_out: int) -> Block:
    leaves = dict(block.leaves)
    shapes = {"w": (d_in, d_out), "b": (d_out,), "gain": (d_out,)}
    leaves = {name: dataclasses.replace(leaf, shape=shapes[name]) for name, leaf in leaves.items()}
    return dataclasses.replace(
        block, d_in=d_in, d_out=d_out, leaves=tuple(leaves.items()), residual=block.residual and d_in == d_out
    )


def _first(dice: Dice, piece: Piece, tied: bool) -> str:
    if piece.place is None:
        return "split ids" if tied or dice.chance(0.6) else "x"
    return dice.weighted({"x": 3, "local ids": 1})


def _loss(dice: Dice, piece: Piece, tied: bool, mix: str) -> Loss:
    d = piece.width
    if piece.place is not None:
        if dice.chance(0.5):
            return Loss("mse", d, (("w", Leaf((d, dice.between(1, 4)), _dtype(dice, mix))),))
        return Loss("classifier", d, (("w", Leaf((d, VOCABULARY), _dtype(dice, mix))), ("b", Leaf((VOCABULARY,)))))
    loss = Loss(
        dice.one_of(("tied", "linear") if tied else ("split head", "linear")),
        d,
        label_smoothing=dice.weighted({0.0: 2, 0.1: 1}),
        z_loss=dice.weighted({0.0: 2, 0.01: 1}),
        soft_cap=dice.weighted({None: 2, 4.0: 1}),
        mean_inside=dice.chance(0.5),
    )
    if tied:
        return loss
    if loss.kind == "linear":
        return dataclasses.replace(loss, leaves=(("table", Leaf((VOCABULARY, d), _dtype(dice, mix), 0)),))
    w = Leaf((d, VOCABULARY), _dtype(dice, mix), 1)
    return dataclasses.replace(loss, leaves=(("w", w), ("b", Leaf((VOCABULARY,), split=0))))


def _extras(dice: Dice, pieces: list[Piece], *, often: float) -> list[Piece]:
    """Add state, keys, skips, aux and trees between stages."""
    chances = {"norm": 0.3, "drop": 0.3, "skip": 0.4, "aux": 0.4, "wrap": 0.2}
    on = {name: dice.chance(often * chance) for name, chance in chances.items()}
    last = len(pieces) - 1
    for i, piece in enumerate(pieces):
        if on["norm"] and dice.chance(0.5):
            piece = dataclasses.replace(piece, norm=True)
        if on["drop"] and dice.chance(0.5):
            piece = dataclasses.replace(piece, keep=dice.one_of((0.5, 0.75)), draws=dice.chance(0.2))
        if on["aux"] and dice.chance(0.5):
            piece = dataclasses.replace(piece, aux=True)
        if on["wrap"] and i < last and dice.chance(0.5):
            piece = dataclasses.replace(piece, wraps=True)
        pieces[i] = piece
    if on["skip"] and last > 0:
        for number in range(dice.between(1, 2)):
            source = dice.between(0, last - 1)
            takers = dice.some_of(range(source + 1, last + 1), 0.5)
            if takers and not pieces[source].sends:
                pieces[source] = dataclasses.replace(pieces[source], sends=f"skip{number}")
                for taker in takers:
                    pieces[taker] = dataclasses.replace(pieces[taker], takes=(*pieces[taker].takes, f"skip{number}"))
    return pieces


def _grouped(
    dice: Dice, pieces: list[Piece], tied: bool, mix: str, *, freezes: bool
) -> tuple[list[Piece], tuple[tuple[str, Leaves], ...]]:
    """Name the groups, and freeze some leaves."""
    found: list[Piece] = []
    groups: dict[str, Leaves] = {}
    for i, piece in enumerate(pieces):
        leaves = {f"{b}/{name}": leaf for b, block in enumerate(piece.blocks) for name, leaf in block.leaves}
        if piece.first in ("local ids", "split ids"):
            d = piece.blocks[0].d_in if piece.blocks else piece.width
            leaves["table/table"] = Leaf((VOCABULARY, d), _dtype(dice, mix), 0 if piece.place is None else None)
        if piece.loss is not None:
            leaves |= {f"loss/{name}": leaf for name, leaf in piece.loss.leaves}
        group = "tied" if tied and i in (0, len(pieces) - 1) else f"g{i}" if leaves else None
        if group == "tied" and i:
            leaves = {}
        # stages with the same place and the same leaves can share their weights
        shared = [
            p.group for p in found if p.place == piece.place and groups.get(p.group or "") == tuple(leaves.items())
        ]
        if leaves and group != "tied" and shared and not freezes and dice.chance(0.3):
            group = shared[0]
        elif group is not None and leaves:
            if freezes and dice.chance(0.25):
                leaves = {name: dataclasses.replace(leaf, frozen=True) for name, leaf in leaves.items()}
            elif freezes:
                some = set(dice.some_of(list(leaves), 0.25))
                leaves = {n: dataclasses.replace(lf, frozen=lf.frozen or n in some) for n, lf in leaves.items()}
            groups[group] = tuple(leaves.items())
        found.append(dataclasses.replace(piece, group=group))
    return found, tuple(groups.items())
