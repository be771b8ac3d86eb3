"""Test the answers to what newcomers type: the words of other libraries, and the usual first mistakes."""

import copy
import functools
import inspect
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_jax
from ipu_jax import Pipeline, Stage, configure, make_train_step
from support.refusals import refusals, refused

configure(2)
ours: Any = ipu_jax  # without types, for calls that are wrong
D, M = 6, 4
PARAMS = {"a": np.eye(D, dtype=np.float32), "b": np.eye(D, dtype=np.float32)}
ONE = {"x": np.ones((3, D), np.float32), "y": np.ones((3, D), np.float32)}
BATCH = {name: np.stack([leaf] * M) for name, leaf in ONE.items()}


def loss(p, mb):
    return jnp.mean((jnp.tanh(mb["x"] @ p["a"]) @ p["b"] - mb["y"]) ** 2)


def of_targets(params, inputs, targets):
    return jnp.mean((inputs @ params["a"] - targets) ** 2)


def of_x(params, x, y):
    return jnp.mean((x["x"] @ params["a"] @ params["b"]) ** 2)


def from_function(fn: Any = loss, params: Any = PARAMS, one: Any = ONE, **options: Any) -> Any:
    return ours.Pipeline.from_function(fn, params, one, **{"ipus": 2, "gradient_accumulation": M, **options})


first = Stage(lambda w, x, mb: mb["x"] @ w, "a", ipu=0)
last = Stage(lambda w, x, mb: jnp.mean((x @ w - mb["y"]) ** 2), "b", ipu=1)
CUT, STAGED = from_function(), Pipeline([first, last], gradient_accumulation=M)
PLACED, STEP = CUT.shard(PARAMS), make_train_step(CUT, optax.sgd(0.1))
STATE = STEP.init(PARAMS)
DOORS: dict[str, Any] = {
    "from_function": lambda **words: ours.Pipeline.from_function(loss, PARAMS, ONE, **{"ipus": 2, **words}),
    "Pipeline": lambda **words: ours.Pipeline([first, last], **words),
    "make_schedule": lambda **words: ours.make_schedule("1f1b", **{"ipus": 2, **words}),
    "make_train_step": lambda **words: ours.make_train_step(loss, optax.sgd(0.1), **words),
    "TrainOptions": ours.TrainOptions,
    "Feed": functools.partial(ours.Feed, ONE, step=STEP),
    "fit": functools.partial(ours.fit, STEP, STATE, None),
    "Checkpoints": functools.partial(ours.Checkpoints, "folder", STEP),
}
M_ELSEWHERE = (
    "num_microbatches n_microbatches num_micro_batches numMicrobatches microbatches chunks gradient_accumulation_steps "
    "gradient_accumulation_count accumulation_steps num_pipeline_microbatches accumulate_grad_batches grad_acc"
)
IPUS_ELSEWHERE = (
    "num_stages n_stages stages pp pp_size pipeline_model_parallel_size ici_pipeline_parallelism num_ipus "
    "ipus_per_replica pipeline_parallel_degree num_devices"
)
# the door, words that are typed there, what is said to give in their place
WORDS = [
    ("from_function", f"{M_ELSEWHERE} micro_batches", "called 'gradient_accumulation' here"),
    ("from_function", IPUS_ELSEWHERE, "called 'ipus' here"),
    ("from_function", "mesh", "from_function makes it: give ipus=, replicas=, axes= and devices="),
    ("from_function", "microbatch_size micro_batch_size mbs batch_size", "give one micro-batch itself"),
    ("from_function", "dp replication_factor num_replicas data_parallel_size", "called 'replicas' here"),
    ("from_function", "tp tensor_model_parallel_size", "give axes={'tensor': 2}"),
    ("from_function", "virtual_stages virtual_pipeline_model_parallel_size num_pipeline_repeats", "'rounds' here"),
    ("from_function", "remat activation_checkpointing checkpoint", "called 'recompute' here"),
    ("from_function", "split_points split_spec", "called 'cuts' here"),
    ("from_function", "rng key seed", "a function of (params, micro_batch, key) gets a key"),
    ("from_function", "optimizer learning_rate", "give it to make_train_step"),
    ("from_function", "dtype bf16", "TrainOptions(precision=...)"),
    ("from_function", "schedul", "did you mean 'schedule'?"),
    ("from_function", "reducton", "did you mean 'reduction'?"),
    ("from_function", "places", "it takes loss, params, micro_batch, ipus, state, replicas"),
    ("from_function", "replcas", "did you mean 'replicas'?"),
    ("Pipeline", f"{M_ELSEWHERE} micro_batches gradient_accum", "gradient_accumulation'"),
    ("Pipeline", "num_stages pp", "give a list of Stage, each with its ipu="),
    ("Pipeline", "ipus", "each Stage has its ipu="),
    ("Pipeline", "replicas devices", "give mesh=make_mesh(replicas, ipus"),
    ("Pipeline", "function loss_fn", "Pipeline.from_function takes a function"),
    ("Pipeline", "places", "it takes stages, mesh, schedule"),
    ("make_schedule", f"{M_ELSEWHERE} micro_batches", "called 'gradient_accumulation' here"),
    ("make_schedule", "num_stages pp", "called 'ipus' here"),
    ("make_schedule", "ipu", "did you mean 'ipus'?"),
    ("make_train_step", M_ELSEWHERE, "give options=TrainOptions(gradient_accumulation=...)"),
    ("make_train_step", "max_gradient_norm max_grad_norm", "give options=TrainOptions(max_gradient_norm=...)"),
    ("make_train_step", "shard_optimizer zero1", "give options=TrainOptions(shard_optimizer=...)"),
    ("make_train_step", "learning_rate lr", "the optimizer has it"),
    ("TrainOptions", f"{M_ELSEWHERE} gradient_acc", "gradient_accumulation'"),
    ("TrainOptions", "bf16 dtype mixed_precision", "give precision='16.32'"),
    ("TrainOptions", "optimizer lr", "make_train_step"),
    ("Feed", "batch_size micro_batch_size", "called 'micro_batch' here"),
    ("Feed", M_ELSEWHERE, "called 'gradient_accumulation' here"),
    ("Feed", "drop_last", "give remainder='drop', 'pad' or 'wrap'"),
    ("Feed", "num_workers", "called 'workers' here"),
    ("fit", "steps max_steps", "called 'updates' here"),
    ("fit", "epoch num_epochs", "'epochs'"),
    ("fit", "checkpoint_dir", "called 'checkpoints' here"),
    ("fit", "callbacks verbose", "give "),
    ("Checkpoints", "keeps max_to_keep", "'keep'"),
]


@pytest.mark.parametrize(("door", "word", "answer"), [(d, w, a) for d, words, a in WORDS for w in words.split()])
def test_a_word_of_another_library_is_answered_by_the_one_that_the_call_takes(door, word, answer):
    with refused(f"{door}() got an unexpected keyword argument {word!r}: ", answer, error=TypeError) as raised:
        DOORS[door](**{word: 4})
    called = re.search(r"(?:it is called|did you mean) '(\w+)'", str(raised.value))
    options = re.search(r"options=(\w+)\((\w+)=", str(raised.value))
    try:  # obeyed: if something is wrong then, it is not this argument
        if called:
            DOORS[door](**{called[1]: 4})
        elif options:
            inspect.signature(getattr(ours, options[1])).bind(**{options[2]: 4})
    except Exception as error:
        if re.search("unexpected keyword|multiple values", str(error)):
            raise


@refusals(
    # arguments
    (lambda: ours.Pipeline(), "Pipeline() missing 1 required", "'stages'"),
    (lambda: ours.Pipeline.from_function(loss, PARAMS, ONE), "from_function() missing 1 required", "'ipus'"),
    (lambda: operator.methodcaller("report", BATCH)(STAGED), "Pipeline.report() missing 1 required", "'batch'"),
    (lambda: operator.methodcaller("__call__", BATCH)(STEP), "TrainStep() missing 1 required", "'batch'"),
    (lambda: ours.Stage(loss, param="w"), "Stage() got", "did you mean 'params'?"),
    (lambda: ours.Outputs(1, auxs=3), "Outputs() got", "did you mean 'aux'?"),
    (lambda: ours.verify(CUT, BATCH, BATCH, tol=1), "verify() got", "it is called 'rtol' here"),
    (lambda: operator.methodcaller("init", BATCH, keys=1)(STEP), "TrainStep.init() got", "did you mean 'key'?"),
    (lambda: ours.steps.Replicas(loss, replication=2), "Replicas() got", "did you mean 'replication_factor'?"),
    (lambda: ours.observe.RunLog(tensorbord="x"), "RunLog() got", "did you mean 'tensorboard'?"),
    (lambda: ours.observe.write_report("x", [], schedule=3), "write_report() got", "did you mean 'schedules'?"),
    # the function
    (lambda: from_function(of_targets, one=(ONE["x"], ONE["y"])), "as 'targets'", "of_targets(params, micro_batch[0]"),
    (
        lambda: from_function(of_x),
        "takes 'y'",
        "ignores it",
        "of_x(params, micro_batch[0], micro_batch[1])",
    ),
    (lambda: from_function(lambda p, s, mb: (loss(p, mb), s)), "key as 'mb'", "if s is a state, give state="),
    (lambda: from_function(lambda params, x, y, z: 0.0), "4 arguments, params, x, y, z", "(params, micro_batch, key)"),
    (lambda: from_function(PARAMS, loss), "loss={'a'", "loss and params are swapped"),
    (lambda: from_function(params=ONE, one=PARAMS), "params and micro_batch are swapped", "(loss, params, micro_batch"),
    (lambda: from_function(jax.value_and_grad(loss)), "is a jax.value_and_grad(loss)", "give loss, whose"),
    (lambda: from_function(jax.grad(loss)), "loss returns a dict", "a float scalar"),
    (lambda: from_function(lambda p, mb: (mb["x"] @ p["a"]).mean(0)), "loss returns float32[6]", "a float scalar"),
    (lambda: from_function(lambda p, mb: 3), "loss returns 3", "a float scalar"),
    (lambda: from_function(lambda p, mb: None), "loss returns None", "a float scalar"),
    (lambda: from_function(lambda p, s, mb: loss(p, mb), state={"n": np.zeros(2)}), "one value", "(loss, new_state)"),
    (lambda: from_function(ipus=0), "ipus=0 is not a count", "at least 1"),
    (lambda: from_function(ipus=64), "needs 64 IPUs", "configure(64)"),
    (lambda: from_function(recompute=True), "recompute=True", "give 'all'"),
    (lambda: from_function(cuts=2), "cuts=2", "a list of names", "give one"),
    (lambda: from_function(params={**PARAMS, "n": np.arange(3)}), "params['n'] is int32", "freeze it"),
    (lambda: from_function(frozen="a"), "frozen is 'a'", "True or False"),
    (lambda: from_function(lambda p, mb: jax.lax.pmean(loss(p, mb), "replica")), "axis 'replica'", "leave pmean"),
    # weights, batch, key, state
    (lambda: CUT.value_and_grad(PARAMS, BATCH), "params is a dict", "pipeline.shard("),
    (lambda: CUT.value_and_grad(PLACED, ONE), "batch['x'] has shape (3, 6)", "(gradient_accumulation, ...) = (4, ...)"),
    (lambda: CUT.value_and_grad(PLACED, {"x": BATCH["x"]}), "batch['y'] is missing", "['x'], ['y']"),
    (lambda: CUT.value_and_grad(PLACED, {**BATCH, "z": BATCH["x"]}), "batch['z'] is unknown", "['x'], ['y']"),
    (lambda: from_function(one=BATCH).value_and_grad(PLACED, BATCH), "float32[3, 6]", "cut for float32[4, 3, 6]"),
    (
        lambda: CUT.value_and_grad(PLACED, BATCH, key=KEY),
        "no stage takes one",
        "a function of (params, micro_batch, key)",
    ),
    (lambda: CUT.value_and_grad(PLACED, BATCH, PLACED), "no stage holds any", "a function with state="),
    (lambda: CUT.shard({"a": PARAMS["a"]}), "it has no params['b']", "give a tree like that one"),
    (lambda: CUT.shard({**PARAMS, "a": np.eye(3)}), "params['a'] has shape (3, 3)", "(6, 6)"),
    (lambda: CUT.shard(PLACED), "params is placed already", "unshard(params)"),
    (lambda: CUT.unshard(PARAMS), "sharded is a dict", "pipeline.shard("),
    (lambda: ours.verify(CUT, PARAMS, BATCH), "params is a dict", "pipeline.shard("),
    (lambda: ours.verify(loss, PARAMS, BATCH), "pipeline is a function", "give a Pipeline"),
    # stages
    (lambda: ours.Pipeline(loss), "stage 0 is <function loss", "Pipeline.from_function"),
    (lambda: Pipeline([Stage(loss, "a", ipu=1), Stage(loss, "b", ipu=2)]), "on IPU 1, 2", "IPUs count from 0"),
    # steps
    (lambda: ours.make_train_step(CUT, optax.adam), "optimizer=<function adam", "give optax.sgd(...)"),
    (lambda: ours.make_train_step([first, last], optax.sgd(0.1)), "model=[Stage(", "or Pipeline(stages)"),
    (lambda: copy.deepcopy(STEP), "a TrainStep", "neither copied nor pickled", "make another one"),
    (lambda: ours.TrainOptions(precision="bf16"), "precision='bf16'", "give '16.32', which computes in bfloat16"),
    (lambda: ours.TrainOptions(precision=jnp.float16), "float16", "give '16.32' with half='float16'"),
    (lambda: ours.TrainOptions(loss_scale="dynamic"), "loss_scale='dynamic'", "DynamicScale()"),
    (lambda: ours.TrainOptions(on_nonfinite="raise"), "on_nonfinite='raise'", "give 'stop'"),
    # data and training
    (lambda: ours.Feed((x for x in [ONE]), step=STEP, micro_batch=3), "is of type generator", "items='examples'"),
    (lambda: ours.Feed("data.npz", step=STEP, micro_batch=3), "source is of type str", "give arrays"),
    (lambda: ours.Feed({"x": np.ones(5), "y": np.ones(4)}, step=STEP, micro_batch=1), "5 at source['x']", "a row of"),
    (lambda: ours.Feed(ONE, step=STEP, micro_batch=3), "takes 12 examples", "lower one of them"),
    (lambda: ours.Feed(ONE, micro_batch=1), "neither step= nor mesh= is given", "step=step"),
    (lambda: ours.fit(STEP, STATE, BATCH, epochs=1), "feed=dict", "give Feed("),
    (lambda: ours.fit(CUT, STATE, BATCH, epochs=1), "is not a training step", "make_train_step("),
)
def test_a_first_mistake_is_answered_by_its_mend(call, holds):
    with refused(*holds, error=Exception):
        call()


KEY = jax.random.key(0)


def test_a_first_stage_that_computes_with_x_is_told_to_read_the_micro_batch():
    pipeline = Pipeline([Stage(lambda w, x, mb: x @ w, "a"), last], gradient_accumulation=M)
    with pytest.raises(TypeError, match="NoneType") as raised:
        pipeline.value_and_grad(STAGED.shard(PARAMS), BATCH)
    assert raised.value.__notes__[:1] == [
        "raised in stage 0, 'a'; x of the first stage is None: it reads the micro-batch"
    ]


def test_every_option_of_from_function_is_in_its_signature():
    taken = inspect.signature(Pipeline.from_function).parameters
    assert {"gradient_accumulation", "reduction", "ipu_memory", "guards", "schedule", "frozen", "specs"} <= {*taken}
    assert all(p.kind != p.VAR_KEYWORD for p in taken.values())
    assert "function" not in inspect.signature(Pipeline).parameters


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("import ipu_jax; ipu_jax.nnx_stage", "a module is a function of its weights, Pipeline.from_function(loss"),
        ("from ipu_jax import linen_stage", "a module is a function of its weights, Pipeline.from_function(loss"),
        ("from ipu_jax.nn import equinox_stage", "a module is a function of its weights, Pipeline.from_function(loss"),
        ("from ipu_jax import Pipeline; Pipeline.from_layers", "a list of layers is a loop in a function"),
    ],
)
def test_a_name_that_is_gone_says_the_new_way(code, way):
    with pytest.raises((AttributeError, ImportError)) as raised:
        exec(code)
    assert way in str(raised.value)
