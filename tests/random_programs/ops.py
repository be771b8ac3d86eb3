"""Test values and gradients of every op of `sharded_ops` on random meshes, splits, shapes, dtypes and options.

A program maps an op over a mesh with axis "ipu", and sometimes an axis "data" over which the tokens are split. Its
gradient is computed outside the `shard_map` or inside it, under check_vma=True or False. The dense program computes the
parts of "data" one by one, on whole arrays.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from random_programs.closeness import as_float64, assert_close, coarsest, nudged
from random_programs.dice import Dice
from random_programs.given_ops import OPS, Draw, Given
from sharded_ops import Split

SMOOTH = (
    *("softmax", "log_softmax", "layer_norm", "rms_norm", "matmul columns", "matmul rows", "tied_projection"),
    *("log_softmax_cross_entropy", "linear_cross_entropy"),
)
"""Ops that a unit in the last place of their inputs changes no more than rounding does. The others make choices."""


class Case:
    """A case of one op, and how it is mapped and differentiated."""

    def __init__(self, dice: Dice):
        self.op = dice.one_of(sorted(OPS))
        self.ipus = dice.weighted({1: 1, 2: 4, 3: 2, 4: 3, 5: 1, 8: 1})
        self.parts = 1 if self.ipus > 4 else dice.weighted({1: 3, 2: 3 if self.ipus <= 4 else 0})
        self.two_axes = self.parts > 1 or dice.chance(0.1)
        self.typed, self.inside = dice.chance(0.6), dice.chance(0.4)
        self.dtype = dice.weighted({"float32": 4, "bfloat16": 1, "float16": 0.5})
        self.given: Given = OPS[self.op](Draw(dice, self.ipus, self.parts, self.dtype))
        self.seed = dice.number()

    def __str__(self) -> str:
        mesh = f"data={self.parts} x ipu={self.ipus}" if self.two_axes else f"ipu={self.ipus}"
        arrays = ", ".join(
            f"{name} {array.dtype}{list(array.shape)} {spec}"
            for name, array, spec in zip(self.given.names, self.given.arrays, self.given.specs, strict=True)
        )
        return (
            f"{self.op}({arrays}, {self.given.options})\n  mesh {mesh}, check_vma={self.typed}, gradient "
            f"{'inside' if self.inside else 'outside'}, result {self.given.out_spec}"
        )

    def check(self) -> None:
        given = self.given
        arrays = [
            array if dim is None else _padded(Split(array.shape[dim], self.ipus), array, dim)
            for array, dim in zip(given.arrays, given.ragged, strict=True)
        ]
        (exact,), rounded = self._dense(exact=True), self._dense(exact=False)
        ct = self._cotangent(exact)
        padded_ct = ct
        if given.out_ragged is not None:
            padded_ct = _padded(Split(given.out_size, self.ipus), ct, given.out_ragged, given.ct_fill)
        out, gradients = jax.device_get(self._program()(arrays, padded_ct))
        if given.out_ragged is not None:
            out = np.take(out, range(given.out_size), axis=given.out_ragged)
        eps = coarsest([] if self.dtype == "float32" else [self.dtype])
        assert_close("the result", out, exact, rounded, eps)
        (wanted,), of_rounded = self._gradients(ct, exact=True), self._gradients(ct, exact=False)
        found = []
        for i, gradient in zip(self._floats, gradients, strict=True):
            assert gradient.dtype == given.arrays[i].dtype, f"the gradient of {given.names[i]} is {gradient.dtype}"
            dim = given.ragged[i]
            if dim is not None:
                real, padding = np.split(gradient, [given.arrays[i].shape[dim]], axis=dim)
                assert not padding.astype(np.float32).any(), f"the gradient of {given.names[i]}'s padding is not zero"
                gradient = real
            found.append(gradient)
        names = [given.names[i] for i in self._floats]
        as_dict = lambda leaves: dict(zip(names, leaves, strict=True))
        # dlogits are (probability - target) * cotangent, where in confident rows almost everything cancels
        terms = float(np.abs(ct).max(initial=0)) if self.op.endswith("cross_entropy") else 0.0
        rounded = [as_dict(leaves) for leaves in of_rounded]
        assert_close("gradient", as_dict(found), as_dict(wanted), rounded, eps, terms=terms)

    def _program(self) -> Callable[..., Any]:
        axes, sizes = (("data", "ipu"), (self.parts, self.ipus)) if self.two_axes else (("ipu",), (self.ipus,))
        mesh = jax.make_mesh(
            sizes, axes, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[: math.prod(sizes)]
        )
        given = self.given
        specs = tuple(_without_data(spec) if not self.two_axes else spec for spec in given.specs)
        out_spec = given.out_spec if self.two_axes else _without_data(given.out_spec)
        floats, options = self._floats, {"mesh": mesh, "check_vma": self.typed}

        if not self.inside:
            mapped = jax.shard_map(given.local, in_specs=specs, out_specs=out_spec, **options)

            def outside(arrays: Any, ct: Any) -> Any:
                out, vjp = jax.vjp(self._of_floats(mapped, arrays), *[arrays[i] for i in floats])
                return out, vjp(ct)

            return jax.jit(outside)

        def on_ipu(arrays: Any, ct: Any) -> Any:
            out, vjp = jax.vjp(self._of_floats(given.local, arrays), *[arrays[i] for i in floats])
            if self.typed:
                return out, vjp(ct)
            # untyped, each IPU holds a part of the cotangent: equal parts if the result is the same on several IPUs
            held = [size for axis, size in zip(axes, sizes, strict=True) if axis not in _named(out_spec)]
            gradients = []
            for i, gradient in zip(floats, vjp((ct / math.prod(held)).astype(ct.dtype)), strict=True):
                summed = tuple(axis for axis in axes if axis not in _named(specs[i]))
                gradients.append(lax.psum(gradient, summed) if summed else gradient)
            return out, tuple(gradients)

        out_specs = out_spec, tuple(specs[i] for i in floats)
        return jax.jit(jax.shard_map(on_ipu, in_specs=(list(specs), out_spec), out_specs=out_specs, **options))

    @property
    def _floats(self) -> list[int]:
        """Return the numbers of the floating arguments."""
        return [i for i, is_float in enumerate(self.given.is_float) if is_float]

    def _of_floats(self, run: Callable[..., Any], arrays: Any) -> Callable[..., Any]:
        """Return `run` as a function of its floating arguments alone."""

        def program(*chosen: Any) -> Any:
            replaced = dict(zip(self._floats, chosen, strict=True))
            return run(*(replaced.get(i, array) for i, array in enumerate(arrays)))

        return program

    def _cotangent(self, out: np.ndarray) -> np.ndarray:
        ct = np.random.default_rng(self.seed).normal(size=out.shape)
        return ct.astype(jnp.dtype(self.given.out_dtype or self.dtype))

    def _chunked(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that concatenates the results of `run` on each part of "data"."""

        def whole(*arrays: Any) -> Any:
            results = []
            for part in range(self.parts):
                mine = []
                for array, spec in zip(arrays, self.given.specs, strict=True):
                    if "data" in _named(spec):
                        rows = array.shape[0] // self.parts
                        array = array[part * rows : (part + 1) * rows]
                    mine.append(array)
                results.append(run(*mine))
            return jnp.concatenate(results) if "data" in _named(self.given.out_spec) else results[0]

        return whole

    def _inputs(self, *, exact: bool) -> list[Any]:
        """Return the arrays; if rounding changes little, also arrays changed by a unit in the last place of float32."""
        arrays = self.given.arrays
        if exact:
            return [[as_float64(array) for array in arrays]]
        return [arrays, *(nudged(list(arrays), seed) for seed in range(3 if self.op in SMOOTH else 0))]

    def _dense(self, *, exact: bool) -> list[np.ndarray]:
        """Return the results of the dense program for each of the inputs."""
        with jax.enable_x64(exact):
            run = jax.jit(self._chunked(lambda *arrays: self.given.dense(*arrays, exact=exact)))
            return [np.asarray(run(*arrays)) for arrays in self._inputs(exact=exact)]

    def _gradients(self, ct: np.ndarray, *, exact: bool) -> list[list[np.ndarray]]:
        """Return the gradients of the floating arrays for each of the inputs."""
        with jax.enable_x64(exact):
            run = self._chunked(lambda *arrays: self.given.dense(*arrays, exact=exact))

            def summed(chosen: Any, arrays: Any) -> Any:
                out = self._of_floats(run, arrays)(*chosen)
                return jnp.sum(out * jnp.asarray(ct, out.dtype))

            gradients, floats = jax.jit(jax.grad(summed)), self._floats
            inputs = self._inputs(exact=exact)
            return [list(map(np.asarray, gradients([arrays[i] for i in floats], arrays))) for arrays in inputs]


def _padded(split: Split, array: np.ndarray, dim: int, fill: float = np.nan) -> np.ndarray:
    """Return the array padded with values that become visible wherever padding leaks."""
    widths = [(0, split.padding if d == dim % array.ndim else 0) for d in range(array.ndim)]
    return np.pad(array, widths, constant_values=array.dtype.type(fill))


def _named(spec: P) -> set[str]:
    found: set[str] = set()
    for part in spec:
        found |= set(part) if isinstance(part, tuple) else {part} if part else set()
    return found


def _without_data(spec: P) -> P:
    return P(*[None if p == "data" else p[-1] if isinstance(p, tuple) else p for p in spec])
