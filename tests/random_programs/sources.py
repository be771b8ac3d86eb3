"""Draw the source of loss functions, part by part, as a stranger writes them.

    x = batch["d2"] @ params["f1"]                                # the start
    for k in [1, 0, -1]:                                          # a part: a loop over rows of rows of a stacked leaf
        x = mix(x, params["a3"][1:][::2][k])
    x, y = lax.scan(layer4, x, (params["a3"][:3],))               # another part: a scan over other rows of it
    y5 = y[0]
    return jnp.mean((x @ params["c7"] - batch["e8"]) ** 2)        # the end

Values stay bounded, so that the loss of long functions is well conditioned.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from random_programs.dice import Dice, normal

ROWS, VOCABULARY = 3, 7


def norm(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.5)


def mix(x: Any, w: Any) -> Any:
    return 0.7 * (x + jnp.sin(x @ w))


def drop(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.1)


@jax.custom_vjp
def bent(x: Any) -> Any:
    return jnp.where(x > 0, x, 0.3 * x)


bent.defvjp(lambda x: (bent(x), x), lambda x, g: (jnp.where(x > 0, g, 0.5 * g),))


@jax.custom_jvp
def soft(x: Any) -> Any:
    return x / (1 + jnp.abs(x))


@soft.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return soft(*primals), tangents[0] / (1 + jnp.abs(primals[0])) ** 2


SCOPE = {"jax": jax, "jnp": jnp, "lax": lax, "norm": norm, "mix": mix, "drop": drop, "bent": bent, "soft": soft}


class Source:
    """The source of a function, drawn part by part, and its arguments.

    Attributes:
        params, state, batch: the arguments; batch is one micro-batch.
        args: the names of the function's arguments.
        lines: the function.
        coarse: the names of weights whose gradients are rounded to bfloat16.
    """

    def __init__(self, dice: Dice):
        self.dice, self.width = dice, dice.between(4, 6)
        self.params: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.batch: dict[str, Any] = {
            "labels": np.random.default_rng(dice.number()).integers(VOCABULARY, size=ROWS).astype(np.int32),
            "keep": np.random.default_rng(dice.number()).random((ROWS, self.width)) < 0.7,
            "flag": np.bool_(dice.chance(0.5)),
        }
        self.coarse: set[str] = set()
        self.args = ["params", *dice.some_of(["state"], 0.5), "batch", *dice.some_of(["key"], 0.4)]
        self._stacks: dict[str, int] = {}  # stacked leaves of shape (layers, width, width), and their layers
        self._earlier: list[str] = []  # activations of shape (ROWS, width)
        self._stacked: list[tuple[str, int]] = []  # results of scans, of shape (layers, width), and their layers
        self._last: list[str] = []  # lines for the end
        self._indent, self._count = "    ", 0
        self.lines: list[str] = [f"def loss({', '.join(self.args)}):"]
        self._write("penalty, aux = 0.0, {}", *(["new = dict(state)"] if "state" in self.args else []))
        table, is_tied = self._leaf("params", VOCABULARY, self.width, scale=1.0), dice.chance(0.5)
        self._write(f'x = {table}[batch["labels"]]' if is_tied else f"x = {self._fresh()} @ {self._matrix()}")
        possible = {part: weight for part, weight, needs in PARTS if needs in ("", *self.args)}
        for _ in range(dice.between(5, 12)):
            dice.weighted(possible)(self)
        for tree in [name for name in self.args if name != "key"]:
            for _ in range(max(dice.between(0, 1), tree == "state" and not self.state)):
                self._leaf(tree, dice.between(1, 4))  # nothing reads it
        self._write(*dice.shuffled(self._last))
        if is_tied:
            self._write(f"scores = jax.nn.log_softmax(x @ {table}.T)")
            error = '-jnp.mean(scores[jnp.arange(len(x)), batch["labels"]])'
        else:
            error = f"jnp.mean((x @ {self._matrix()} - {self._fresh()}) ** 2)"
        self.has_aux = any("aux[" in line for line in self.lines)
        returned = [
            f"{error} + penalty",
            *(["aux"] if self.has_aux else []),
            *(["new"] if "state" in self.args else []),
        ]
        self._write(f"return {', '.join(returned)}")

    def _write(self, *lines: str) -> None:
        self.lines += [self._indent + line for line in lines]

    def _write_one(self, *ways: str) -> None:
        self._write(self.dice.one_of(ways))

    def _name(self) -> str:
        """Return a new name, whose first letter decides the order of leaves."""
        self._count += 1
        return f"{self.dice.one_of('abcdefgh')}{self._count}"

    def _leaf(self, tree: str, *shape: int, scale: float = 0.5) -> str:
        name = self._name()
        getattr(self, tree)[name] = normal(self.dice.number(), shape, scale).astype(np.float32)
        return f'{tree}["{name}"]'

    def _matrix(self) -> str:
        return self._leaf("params", self.width, self.width)

    def _fresh(self) -> str:
        return self._leaf("batch", ROWS, self.width)

    def _rows(self) -> tuple[str, int]:
        """Return an expression for rows of a stack, often rows of rows, and their number."""
        dice = self.dice
        if not self._stacks or dice.chance(0.4):
            count = dice.between(3, 5)
            self._stacks[self._leaf("params", count, self.width, self.width)] = count
        stack = text = dice.one_of(list(self._stacks))
        count = self._stacks[stack]
        for _ in range(dice.weighted({0: 2, 1: 4, 2: 3, 3: 1})):
            first = dice.between(0, count - 1)
            last = dice.between(first + 1, count)
            if dice.chance(0.1):
                text, count = f"lax.dynamic_slice_in_dim({text}, {first}, {last - first})", last - first
                continue
            ways = [f"[{first}:]", f"[:{last}]", f"[{first}:{last}]"]
            odd = [f"[{first - count}:{last - count or ''}]", f"[{first}::2]", "[::-1]", f"[{last - 1}::-1]"]
            way = dice.one_of(odd if dice.chance(0.3) else ways)
            text, count = text + way, len(eval(f"range({count}){way}"))
        cast = dice.weighted(
            {"{}": 8, "jnp.tanh({})": 1, "(2 * {})": 1, "{}.astype(jnp.bfloat16).astype(jnp.float32)": 2}
        )
        self.coarse |= {stack.split('"')[1]} if "bfloat16" in cast else set()
        return cast.format(text), count

    def _key(self) -> str:
        name = self._name()
        self._write_one(f"key, {name} = jax.random.split(key)", f"{name} = jax.random.fold_in(key, {self._count})")
        return name

    # the parts

    def _dense(self) -> None:
        name, shape = self._name(), (self.width, self.width)
        seeds = [self.dice.number() for _ in range(self.dice.between(1, 2))]
        layers = [{"w": normal(seed, shape), "b": normal(seed + 1, shape[:1])} for seed in seeds]
        self.params[name] = jax.tree.map(lambda leaf: leaf.astype(np.float32), layers)
        self._write(f'for layer in params["{name}"]:', '    x = mix(x, layer["w"]) + layer["b"]')

    def _loop(self) -> None:
        dice, (rows, count) = self.dice, self._rows()
        if dice.chance(0.4):
            name = self._name()
            self._write(f"{name} = {rows}")
            rows = name
        way = dice.weighted({"k": 6, "dynamic": 2, "take": 1, "for": 1, "unstack": 1, "fori": 1, "vmap": 1})
        if way == "fori":
            self._write(f"x = lax.fori_loop(0, {count}, lambda k, x: mix(x, {rows}[k]), x)")
        elif way == "vmap":
            self._write(f"x = norm(jax.vmap(mix, (None, 0))(x, {rows}).sum(0))")
        elif way in ("for", "unstack"):
            self._write(f"for w in {rows if way == 'for' else f'jnp.unstack({rows})'}:", "    x = mix(x, w)")
        else:
            order = [k - count if dice.chance(0.2) else k for k in dice.some_of(range(count), 0.7)]
            order = dice.shuffled(order) if dice.chance(0.3) else order
            row = {"k": f"{rows}[k]", "take": f"jnp.take({rows}, k, axis=0)"}
            dynamic = f"lax.dynamic_index_in_dim({rows}, k, keepdims=False)"
            self._write(f"for k in {order}:", f"    x = mix(x, {row.get(way, dynamic)})")

    def _halves(self) -> None:
        """Write two groups of layers out of one stack, each a loop or a scan."""
        count = self.dice.between(3, 5)
        stack, first = self._leaf("params", count, self.width, self.width), self.dice.between(1, count - 1)
        for rows in self.dice.shuffled([f"{stack}[:{first}]", f"{stack}[{first}:]"]):
            if self.dice.chance(0.6):
                self._write(f"x = lax.scan(lambda x, w: (mix(x, w), None), x, {rows})[0]")
            else:
                self._write(f"for k in range(len({rows})):", f"    x = mix(x, {rows}[k])")

    def _scan(self) -> None:
        """Write a scan over rows and perhaps other weights, activations, state, keys, or results of other scans."""
        dice, (rows, count), layer = self.dice, self._rows(), self._name()
        xs, terms, ys = {"w": rows}, ["x"], dict[str, str]()
        if dice.chance(0.3):
            xs["bias"] = self._leaf("params", count, self.width)
        if dice.chance(0.2):
            xs["own"] = self._leaf("batch", count, ROWS, self.width)
        same = [name for name, layers in self._stacked if layers == count]
        if same and dice.chance(0.7):
            xs["other"] = dice.one_of(same)
        if "state" in self.args and self._indent == "    " and dice.chance(0.4):
            xs["s"] = self._leaf("state", count, self.width)
            ys[xs["s"].replace("state", "new")] = "0.9 * s + 0.1 * x.mean(0)"
        terms += [name for name in xs if name != "w"]
        if "key" in self.args and dice.chance(0.3):
            xs["k"] = f"jax.random.split({self._key()}, {count})"
        if dice.chance(0.4):
            name = self._name()
            ys[name] = dice.one_of(("x.mean(0)", "jnp.tanh(x[0] @ w)", "x[-1]"))
            self._stacked.append((name, count))
        fixed = f" @ {self._matrix()}" if dice.chance(0.2) else ""
        x = f"mix({' + '.join(terms)}, w){fixed}"
        carry, start, after = ("(x, n)", "(x, 0)", "(x, n + 1)") if dice.chance(0.2) else ("x", "x", "x")
        self._write(
            f"def {layer}(carry, row):",
            f"    {carry}, ({', '.join(xs)},) = carry, row",
            f"    x = {f'drop({x}, k)' if 'k' in xs else x}{' + 0.1 * jnp.cos(n)' if carry != 'x' else ''}",
            f"    return {after}, ({''.join(f'{value}, ' for value in ys.values())})",
        )
        layer = f"jax.checkpoint({layer})" if dice.chance(0.3) else layer
        how = dice.weighted({"": 5, ", reverse=True": 4, ", unroll=2": 1})
        self._write(f"{carry}, y = lax.scan({layer}, {start}, ({', '.join(xs.values())},){how})")
        self._write(*(f"{name} = y[{k}]" for k, name in enumerate(ys)))

    def _result_of_scan(self) -> None:
        if self._stacked:
            name, count = self.dice.one_of(self._stacked)
            k = self.dice.between(-count, count - 1)
            self._write_one(*(f"x = norm(x + {y})" for y in (f"{name}[{k}]", f"{name}.mean(0)", f"{name}[::-1][{k}]")))

    def _under(self) -> None:
        """Write parts under one `jax.checkpoint` or `jax.jit`, or as a branch of a `lax.cond`."""
        dice, name, indent, stacked = self.dice, self._name(), self._indent, [*self._stacked]
        given = "x, key" if "key" in self.args else "x"
        self._write(f"def {name}({given}):")
        self._indent += "    "
        for _ in range(dice.between(1, 2)):
            dice.one_of((Source._loop, Source._scan, Source._dense, Source._activation))(self)
        self._write("return x")
        self._indent, self._stacked = indent, stacked
        dots = "jax.checkpoint({}, policy=jax.checkpoint_policies.dots_saveable)({})"
        cond = 'lax.cond(batch["flag"], {}, lambda x, *_: -x, {})'
        way = dice.weighted({"jax.checkpoint({})({})": 4, dots: 1, "jax.jit({})({})": 1, cond: 1})
        self._write(f"x = {way.format(name, given)}")

    def _activation(self) -> None:
        constant = normal(self.dice.number(), (self.width,)).round(2).tolist()
        self._write_one(
            *("x = jax.nn.relu(x)", "x = 2 * jax.nn.softmax(x)", "x = bent(x)", "x = soft(x)", "x = norm(x)"),
            *("x = jax.nn.softmax(x @ x.T) @ x + x", "x = jnp.sort(x, -1) + x", "x = x[jnp.argsort(x[:, 0])]"),
            *(f"x = x * jnp.array({constant})", 'x = jnp.where(batch["keep"], x, 0.2)'),
            'x = x + jax.nn.one_hot(batch["labels"], x.shape[-1])',
        )

    def _input(self) -> None:
        self._write_one(f"x = norm(x + {self._fresh()})", f"x = norm(x + {self._fresh()} @ {self._matrix()})")

    def _skip(self) -> None:
        """Keep an activation for later, or use one."""
        if self._earlier and self.dice.chance(0.6):
            name = self.dice.one_of(self._earlier)
            self._write_one(f"x = norm(x + {name})", f"x = norm(x + {name} @ {self._matrix()})")
        else:
            self._earlier.append(self._name())
            self._write(f"{self._earlier[-1]} = x")

    def _of_weights(self) -> None:
        """Use a value that follows from weights alone twice."""
        name, leaf = self._name(), self._leaf("params", self.width)
        self._write_one(
            *(f"{name} = {value}" for value in (f"jnp.exp(0.3 * {leaf})", f"jnp.cumsum({leaf})", f"norm({leaf})"))
        )
        self._write(f"x = norm(x * {name})")
        self._last.append(f"x = x + {name}")

    def _penalty(self) -> None:
        rows, _ = self._rows()
        every = "sum(jnp.mean(leaf**2) for leaf in jax.tree.leaves(params))"
        way = self.dice.one_of((f"jnp.mean({rows} ** 2)", f"jnp.sum({rows}[0] ** 2)", "jnp.mean(x**2)", every))
        self._now_or_last(f"penalty = penalty + 0.1 * {way}")

    def _now_or_last(self, line: str) -> None:
        if self.dice.chance(0.5):
            self._write(line)
        else:
            self._last.append(line)

    def _aux(self) -> None:
        rows, _ = self._rows()
        ways = [
            "x.mean(0)",
            "jnp.argmax(x, -1)",
            f"{rows}.sum(0)",
            'batch["labels"].sum()',
            "3.0",
            '{"x": x, "n": penalty}',
        ]
        ways += [f'state["{name}"]' for name in self.state]
        self._write(f'aux["{self._name()}"] = {self.dice.one_of(ways)}')

    def _running_mean(self) -> None:
        leaf = self._leaf("state", self.width)
        if self.dice.chance(0.7):
            self._now_or_last(f"x = norm(x + {leaf})")
        mean = self.dice.one_of(("x.mean(0)", "lax.stop_gradient(x[0])"))
        self._now_or_last(f"{leaf.replace('state', 'new')} = 0.9 * {leaf} + 0.1 * {mean}")

    def _counter(self) -> None:
        name = self._name()
        self.state[name] = np.int32(self.dice.between(0, 5))
        self._write(f'x = x * jnp.cos(0.1 * state["{name}"])')
        self._now_or_last(f'x = x + 0.1 * jnp.sin(1.0 * state["{name}"])')
        step = self.dice.one_of(("1", 'batch["labels"][0]'))
        self._now_or_last(f'new["{name}"] = state["{name}"] + {step}')

    def _random(self) -> None:
        key = self._key()
        self._write_one(f"x = drop(x, {key})", f"x = x + 0.1 * jax.random.normal({key}, x.shape)")


PARTS: tuple[tuple[Callable[[Source], None], float, str], ...] = (
    (Source._dense, 2, ""),
    (Source._loop, 6, ""),
    (Source._scan, 6, ""),
    (Source._halves, 2, ""),
    (Source._result_of_scan, 2, ""),
    (Source._under, 2, ""),
    (Source._activation, 3, ""),
    (Source._input, 1, ""),
    (Source._skip, 3, ""),
    (Source._of_weights, 1, ""),
    (Source._penalty, 1, ""),
    (Source._aux, 2, ""),
    (Source._running_mean, 2, "state"),
    (Source._counter, 2, "state"),
    (Source._random, 2, "key"),
)
"""The parts, how often each is drawn, and the argument that it needs."""
