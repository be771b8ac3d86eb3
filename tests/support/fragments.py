"""Run the calls that a page names in its text, each as if it were pasted after the page's program.

On the pages that compare libraries, our cells run as they are printed. Elsewhere `Stage(recompute="all")` is shorthand:
what the call needs besides is filled in by the names of its parameters.
"""

import ast
import dataclasses
import functools
import inspect
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import ipu_jax
import sharded_ops
from support import documents, public_api

MODULES = (sharded_ops, ipu_jax, *(getattr(ipu_jax, name) for name in public_api.SUBJECTS))
PUBLIC = {name: getattr(module, name) for module in MODULES for name in module.__all__}

_CODE = re.compile(r'(?<!`)`([^`]+)`(?!`)|"([\w.-]+)"')
_MODULES = {module.__name__: module for module in (dataclasses, ipu_jax, jax, optax, sharded_ops)}
_MODULES |= {"jnp": jnp, "np": np, "PartitionSpec": jax.P}
_OTHERS = ("jax", "jnp", "np", "optax", "module", "array")  # what is called there is not ours
_OPS = re.compile("|".join(rf"\b{op}\(" for op in sharded_ops.__all__ if op.islower()))
_NAME = re.compile(
    r"(?<![\w.-])[A-Za-z_]\w*(?![\w-])(?!\s*=(?!=))"
)  # no attribute, keyword or part of a command's name
_FILE = re.compile(r"[\w/.-]+\.(?:py|svg|json|gz|html|csv|txt)")


def found(path: Path, compares: bool) -> Iterator[str]:
    """Return the code in a page's text. On a page that compares libraries, the first cells of tables are theirs.

    There, a quoted word after a call stands for the call with that value: `Stage(recompute="all")` or "none".
    """
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\n|\n(?=\|)", text):
        is_row = compares and part.startswith("|")
        call = ""
        for code, value in _CODE.findall(re.split(r"(?<!\\)\|", part, maxsplit=2)[2] if is_row else part):
            if code:
                call = " ".join(code.replace("\\|", "|").split())
                yield call
            elif is_row and call.endswith('")'):
                yield re.sub(r'"[^"]*"\)$', f'"{value}")', call)


def check(program: dict[str, Any], paths: Iterable[str], *, compares: bool) -> None:
    """Run the fragments of pages after a page's program, and print how many ran.

    Args:
        program: the names of the page's program: `stages`, `weights`, `dataset`, `batch`, `step`, `state`, ...
        paths: the pages, relative to the repository.
        compares: they compare libraries, so nothing is filled in.

    Raises:
        AssertionError: fragments failed; the message has a line for each.
    """
    if compares:
        names = _examples(program) | program
    else:
        program = _shorthand()
        names = PUBLIC | _MODULES | _examples(program) | program
    failed, ran = [], set[str]()
    warnings.filterwarnings("ignore", "key is not used")  # the program draws nothing
    for path in paths:
        for code in found(documents.ROOT / path, compares):
            try:
                named = set(_NAME.findall(code)) & (PUBLIC.keys() | _MODULES.keys()) if compares else set[str]()
                assert named <= names.keys(), f"the page's program imports no {', '.join(named - names.keys())}"
                runs = code not in ran and _runs(code, names, compares)
            except Exception as error:
                failed.append(f"{path}: {code}\n    {type(error).__name__}: {str(error)[:300]}")
            else:
                ran |= {code} if runs else set()
    print(f"{len(ran)} fragments ran")
    assert not failed, "\n".join(failed)


def _runs(code: str, names: dict[str, Any], compares: bool) -> bool:
    """Run a fragment if it is a call or an attribute of one of the names, and return whether it is."""
    if _FILE.fullmatch(code):
        return False
    called = re.match(r"(?:with )?(\w+)(?:\.\w+)*\(", code)
    if code.startswith("with ") and not code.endswith(": ..."):
        code = f"{code.removesuffix(':')}: ..."
    try:
        (statement,) = ast.parse(code).body
    except (SyntaxError, ValueError):
        assert not called or called[1] not in {*names, *_FRESH} - {*_OTHERS}, "does not parse"
        return False
    if isinstance(statement, ast.With):
        subject = statement.items[0].context_expr
    elif isinstance(statement, ast.Expr | ast.Assign):
        subject = statement.value
    else:
        return False
    root = subject
    while isinstance(root, ast.Call | ast.Attribute):
        root = root.func if isinstance(root, ast.Call) else root.value
    if root is subject or not isinstance(root, ast.Name) or root.id not in {**names, **_FRESH}:
        return False
    if isinstance(subject, ast.Attribute) and isinstance(statement, ast.Expr) and "(" not in code:
        _look_up(subject, names)
        return True
    if not compares:
        if root.id in _OTHERS:
            return False
        names = names | _meant(code, root.id, names)
    if ".forward(" in code:
        names = names | _of_a_cut_function(names["dataset"], has_state="state=" in code)
    used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    settings = dict(jax.config.values)
    fresh = {name: _FRESH[name](names) for name in used & {*_FRESH}}
    try:
        _run(statement, names | fresh, on_ipus="jax.lax." in code or bool(_OPS.search(code)), completes=not compares)
    finally:
        for name, value in dict(jax.config.values).items():
            if settings[name] is not value:
                jax.config.update(name, settings[name])
    return True


def _meant(code: str, root: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return what `batch`, `state`, `step` and `pipeline` are in a fragment that is shorthand."""
    meant: dict[str, Any] = {}
    if root not in ("step", "feed", "fit") or "find_nonfinite" in code:
        meant["batch"] = names["one_update"]
    if root == "pipeline":
        meant["state"] = None  # of its stages
    if "stages=" in code:
        meant["step"] = names["step_with_state"]
    if "choose_schedule" in code:
        meant["pipeline"] = ipu_jax.Pipeline(names["stages"], schedule="auto", gradient_accumulation=4)
    return meant


def _of_a_cut_function(dataset: dict[str, Any], *, has_state: bool) -> dict[str, Any]:
    """Return what the names are in a fragment with `forward`: it is about a function that was cut."""
    inputs = {name: rows[:4] for name, rows in dataset.items()}
    weights, cache = [jnp.eye(inputs["x"].shape[1])] * 4, jnp.zeros(())

    def loss(params: Any, micro_batch: Any) -> Any:
        return jnp.mean(functools.reduce(jnp.matmul, params, micro_batch["x"]) ** 2)

    def with_cache(params: Any, cache: Any, micro_batch: Any) -> Any:
        return loss(params, micro_batch), cache + 1

    pipeline = ipu_jax.Pipeline.from_function(loss, weights, inputs, ipus=2, gradient_accumulation=4)
    step, fn, others = ipu_jax.make_train_step(pipeline, optax.sgd(0.1)), with_cache if has_state else loss, dataset
    return {"pipeline": pipeline, "step": step, "fn": fn, "inputs": inputs, "cache": cache, "others": others}


def _look_up(chain: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of `a.b.c`, or None where it is a field of a class, which has no value."""
    if isinstance(chain, ast.Name):
        return names[chain.id]
    assert isinstance(chain, ast.Attribute)
    owner = _look_up(chain.value, names)
    if not isinstance(owner, type):
        return None if owner is None else getattr(owner, chain.attr)
    assert hasattr(owner, chain.attr) or chain.attr in getattr(owner, "__dataclass_fields__", {}), "does not exist"
    return None


def _run(statement: ast.With | ast.Expr | ast.Assign, names: dict[str, Any], on_ipus: bool, completes: bool) -> None:
    """Run one statement, and what its result is for: read a batch, make a step of the options."""
    if completes:
        statement = ast.fix_missing_locations(_Completed().visit(statement))
        names["_call"] = lambda function, *args, **options: _call(names, function, args, options)
    subject = statement.items[0] if isinstance(statement, ast.With) else statement
    assert completes or "..." not in ast.unparse(subject), "is not complete"
    if isinstance(statement, ast.With):
        if "trace" in ast.unparse(subject):
            statement.body = ast.parse("for _ in range(2): state, _ = step(state, batch)").body
            names["state"] = _FRESH["state"](names)
        exec(compile(ast.Module([statement], []), "fragment", "exec"), names)
        return
    program = compile(ast.Expression(statement.value), "fragment", "eval")
    if on_ipus:
        _trace_on_all_ipus(lambda: eval(program, names))
        return
    result: Any = eval(program, names)
    if isinstance(result, ipu_jax.Feed):
        next(iter(result))
    elif isinstance(result, ipu_jax.TrainOptions):
        ipu_jax.make_train_step(ipu_jax.Pipeline(names["stages"]), optax.sgd(0.1), result)
    getattr(result, "close", int)()


def _trace_on_all_ipus(function: Callable[[], Any]) -> None:
    """Trace a call that belongs in a concurrent stage."""

    def on_an_ipu() -> jax.Array:
        function()
        return jnp.zeros(())

    mesh = ipu_jax.make_mesh(2, 2)
    jax.eval_shape(jax.shard_map(on_an_ipu, mesh=mesh, in_specs=(), out_specs=jax.P(), check_vma=False))


class _Completed(ast.NodeTransformer):
    """Changes `f(x)` to `_call(f, x)`, and leaves out the dots of a list."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(ast.Name("_call", ast.Load()), [node.func, *node.args], node.keywords)

    def visit_List(self, node: ast.List) -> ast.AST:
        self.generic_visit(node)
        node.elts = [each for each in node.elts if not (isinstance(each, ast.Constant) and each.value is ...)]
        return node


def _call(names: dict[str, Any], function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function of ours with the arguments that it needs besides, found by the names of its parameters."""
    given = [value for value in args if value is not ...]
    if not str(getattr(function, "__module__", "")).startswith(("ipu_jax", "sharded_ops")):
        return function(*given, **options)
    signature = inspect.signature(function)
    signature.bind_partial(*given, **options)  # every keyword exists, also one whose value is left out
    options = {name: names.get(name, ...) if value is ... else value for name, value in options.items()}
    options = {name: value for name, value in options.items() if value is not ...}
    if function is ipu_jax.Feed:
        options = {"micro_batch": 1} | ({} if "mesh" in options else {"step": names["step"]}) | options
    bound = signature.bind_partial(*given, **options).arguments
    for name, parameter in signature.parameters.items():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variable and name not in bound:
            options[name] = names[name]
    return function(*given, **options)


def _examples(program: dict[str, Any]) -> dict[str, Any]:
    """Return what fragments use besides the program: small numbers, arrays, modules, data, a schedule."""
    n = r = R = c = t = 2
    m = M = b = 4
    k, v, V, N = 1, 6, 6, 16
    x = w = y = hidden = np.eye(4, dtype=np.float32)
    table, logits, ids, labels = x[:3], x[:, :3], np.zeros(4, np.int32), np.zeros(4, np.int32)
    images, key = np.ones((2, 28, 28), np.uint8), jax.random.key(0)
    dataset = source = program["dataset"]
    batches, examples = [dataset], _Examples(dataset)
    params, optimizer, weights = program["state"].params, optax.sgd(0.1), program["weights"]
    init_fn, imported = lambda key: jax.tree.map(lambda w: jax.random.normal(key, w.shape), weights), params
    fn, g = program["stages"][0].fn, program["stages"][-1].fn
    f, module = fn, nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    schedule = ipu_jax.make_schedule("1f1b", ipus=2, gradient_accumulation=4)

    # what a reader has
    layers, mse = [(lambda w, x: jnp.tanh(x @ w), jnp.eye(3))] * 8, lambda x, mb: jnp.mean((x - mb["y"]) ** 2)
    loss = lambda w, mb: g(w["head"], f(w["body"], None, mb), mb)
    micro_batch = {name: rows[:16] for name, rows in dataset.items()}
    return {"print": str, **locals()}


def _shorthand() -> dict[str, Any]:
    """Return the program of the pages that do not compare libraries: a small training, and names of its kind."""
    ipu_jax.configure(8)
    size, dim, epoch, seed, replicas, ipus, gradient_accumulation, placement = 6, 0, 0, 0, 2, 2, 4, (0, 1)
    x = y = np.ones((256, 4), np.float32)
    hidden, targets, array, labels, value, balance = x, x[:, :3], x[:6], x[:, 0].astype(np.int32), x, 0.5
    dataset, weights = {"x": x, "y": y}, {"body": np.eye(4, dtype=np.float32), "head": np.eye(4, dtype=np.float32)}
    loader, examples, files = [dataset], _Examples(dataset), None
    layout, split = sharded_ops.Layout.of({"table": x}, {"table": 0}), sharded_ops.Split(3, 2)
    mesh, arrays = ipu_jax.make_mesh(2, 2), layout.place({"table": x}, ipu_jax.make_mesh(2, 2), "ipu")
    like, whole, means, stage_state = weights, {"table": x}, {"body": x}, {"body": x}

    def body(w: Any, x: Any, microbatch: Any) -> Any:
        return jnp.tanh(microbatch["x"] @ w)

    def head(w: Any, x: Any, microbatch: Any) -> Any:
        return x @ w

    def squares(w: Any, x: Any, microbatch: Any) -> Any:
        return jnp.mean((x @ w - microbatch["y"]) ** 2)

    def cross_entropy(y: Any, microbatch: Any) -> Any:
        return optax.losses.softmax_cross_entropy(y, microbatch["y"]).mean()

    def loss_fn(weights: Any, microbatch: Any, key: Any = None) -> Any:
        return squares(weights["head"], body(weights["body"], None, microbatch), microbatch)

    def read(files: Any, seed: int) -> Any:
        return iter([examples[number] for number in range(len(examples))])

    def words() -> nnx.Module:
        return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    model, embed, function, name, loss = loss_fn, body, np.sqrt, "words", squares
    layers = [(lambda w, x: x @ w, weights["body"])] * 8
    Words, Logits, BalanceLoss = words, words, nnx.Variable
    module = nn.Dense(4)
    variables = module.init(jax.random.key(0), x)
    stages = [ipu_jax.Stage(body, "body", ipu=0), ipu_jax.Stage(squares, "head", ipu=1, predict=head)]
    pipeline = ipu_jax.Pipeline(stages, gradient_accumulation=4)
    options = ipu_jax.TrainOptions(device_iterations=4, ema_decay=0.999)
    tx = optax.sgd(0.1)
    step = ipu_jax.make_train_step(pipeline, tx, options)
    state, params = step.init(weights), pipeline.shard(weights)
    with ipu_jax.Feed(dataset, step=step, micro_batch=2) as feed:
        batch, position = next(feed), feed.state()
    one_update = jax.tree.map(lambda leaf: leaf[0], batch.arrays)
    state, outputs = step(state, batch)
    with_state = ipu_jax.Stage(lambda w, s, x, mb: ipu_jax.Outputs(mb["x"] @ w, s), "body", state="body")
    step_with_state = ipu_jax.make_train_step(ipu_jax.Pipeline([with_state, stages[1]]), tx)
    costs = pipeline.stage_costs(params, one_update)
    return locals()


class _Examples:
    """Examples by number, as torch's `Dataset` has them."""

    def __init__(self, dataset: dict[str, Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset["x"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: leaf[index] for name, leaf in self._dataset.items()}


_FRESH: dict[str, Callable[[dict[str, Any]], Any]] = {
    "state": lambda names: jax.tree.map(jnp.copy, names["state"]),  # a step donates its state
    "folder": lambda _: tempfile.mkdtemp(),
    "feed": lambda names: ipu_jax.Feed(names["dataset"], step=names["step"], micro_batch=4),
    "checkpoints": lambda names: ipu_jax.Checkpoints(tempfile.mkdtemp(), names["step"]),
    "stop": lambda _: PUBLIC["StopRequest"]().__enter__(),
}
