"""Say what the words of other libraries are called here: of torch, Megatron, MaxText, JaxPP, Keras and Hugging Face.

A call that does not take `num_microbatches` answers that it is called `gradient_accumulation` here. Underscores and
capitals do not count. Nothing here imports jax.
"""

from typing import Final

_M: Final = (
    "num_micro_batches n_micro_batches nb_micro_batches micro_batches micro_batch_count num_micro_batch n_micro num_mb "
    "n_mb m num_pipeline_micro_batches chunks num_chunks gradient_accumulation_steps gradient_accumulation_count gas "
    "gradient_accumulation_factor accumulation_steps accumulation_count accum_steps accumulate_grad_batches "
    "accumulate_steps grad_accum_steps grad_acc"
)
_SIZE: Final = "micro_batch_size batch_size mbs per_device_batch_size per_device_train_batch_size"

# Per argument: its name here, words for it elsewhere, and what to say where the name is not enough. The first row with
# a word counts whose argument the call takes.
_ROWS: Final[tuple[tuple[str, str, str], ...]] = (
    ("gradient_accumulation", _M, ""),
    (
        "ipus",
        "stages num_stages n_stages stage_count pp pp_size pp_degree pipeline_parallel pipeline_parallelism "
        "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size ici_pipeline_parallelism "
        "dcn_pipeline_parallelism num_ipus n_ipus ipus_per_replica num_devices n_devices world_size",
        "",
    ),
    ("replicas", "mesh", "from_function makes it: give ipus=, replicas=, axes= and devices="),
    (
        "axes",
        "tp tp_size tensor_parallel tensor_parallelism tensor_parallel_size tensor_model_parallel_size mesh_shape "
        "ici_tensor_parallelism num_tensor",
        "give axes={'tensor': 2}, and specs= that name the axis",
    ),
    ("stages", "num_stages n_stages stage_count pp pp_size", "give a list of Stage, each with its ipu="),
    ("stages", "ipus num_ipus n_ipus", "each Stage has its ipu=; Pipeline.from_function takes ipus="),
    ("stages", "replicas", "give mesh=make_mesh(replicas, ipus)"),
    ("stages", "devices", "give mesh=make_mesh(replicas, ipus, devices=...)"),
    (
        "replicas",
        "dp dp_size dp_degree data_parallel data_parallelism data_parallel_size num_replicas n_replicas replication "
        "replication_factor ici_data_parallelism dcn_data_parallelism",
        "",
    ),
    ("replication_factor", "replicas dp dp_size data_parallel_size num_replicas n_replicas", ""),
    (
        "rounds",
        "virtual_stages num_virtual_stages n_virtual_stages stages_per_device stages_per_rank vpp vpp_size "
        "virtual_pipeline_parallel_size virtual_pipeline_model_parallel_size num_rounds interleave circular_repeats "
        "num_pipeline_repeats",
        "",
    ),
    ("stages", "function loss loss_fn fn model", "Pipeline.from_function takes a function"),
    ("schedule", "pipeline_schedule pipeline_parallel_schedule schedule_name execution_strategy algorithm", ""),
    ("reduction", "loss_reduction accumulation_and_replication_reduction_type reduction_type grad_reduction", ""),
    (
        "recompute",
        "remat remat_policy checkpoint checkpoint_policy activation_checkpointing checkpoint_activations "
        "recompute_granularity recomputation enable_recomputation recompute_activations policy",
        "",
    ),
    ("cuts", "split_points split_spec split_at boundaries stage_boundaries cut_points", ""),
    ("loss", _SIZE, "give one micro-batch itself: its arrays have the size"),
    ("loss", "loss_fn loss_function fn fun function model train_fn forward_step_func", ""),
    ("loss", "optimizer lr learning_rate", "give it to make_train_step"),
    ("loss", "dtype precision amp bf16 mixed_precision", "give TrainOptions(precision=...) to make_train_step"),
    ("optimizer", "lr learning_rate", "the optimizer has it, such as optax.sgd(0.1)"),
    ("shard_optimizer", "optimizer", "give it to make_train_step"),
    ("shard_optimizer", "lr learning_rate", "the optimizer of make_train_step has it, such as optax.sgd(0.1)"),
    ("micro_batch", _SIZE, ""),
    ("micro_batch", "batch example example_args example_inputs mb_args sample inputs", ""),
    ("params", "weights variables parameters model_params", ""),
    ("state", "batch_stats mutable model_state", ""),
    ("micro_batch", "rng rngs key seed random dropout_rng", "a function of (params, micro_batch, key) gets a key"),
    ("key", "rng rngs seed prng dropout_rng", "it is called 'key' here, and is jax.random.key(seed)"),
    ("frozen", "freeze trainable stop_gradient", ""),
    ("ipu_memory", "memory memory_limit hbm max_memory available_memory_proportion", ""),
    ("costs", "stage_costs layer_costs work", ""),
    ("remainder", "drop_last drop_remainder last_batch", "give remainder='drop', 'pad' or 'wrap'"),
    ("epochs", "repeat", ""),
    ("workers", "num_workers n_workers num_threads num_parallel_calls", ""),
    ("prefetch", "prefetch_factor buffer_size prefetch_size", ""),
    ("updates", "steps num_steps n_steps max_steps train_steps total_steps num_updates train_iters iterations", ""),
    ("epochs", "num_epochs n_epochs max_epochs num_train_epochs", ""),
    ("checkpoints", "checkpoint_dir checkpoint_folder ckpt_dir output_dir save_dir checkpoint", ""),
    ("evaluate", "eval_fn evaluation validate validation validation_fn eval", ""),
    ("print_every", "log_every logging_steps log_interval log_period", ""),
    ("progress", "verbose", "give progress=, print_every= or say="),
    ("step", "optimizer lr learning_rate", "give it to make_train_step"),
    ("log", "logger callbacks callback", "give a file, or a RunLog, which has TensorBoard's files, too"),
    ("keep", "max_to_keep save_total_limit keep_last max_keep", ""),
    ("every", "save_every save_steps save_interval save_interval_steps checkpoint_period", ""),
    ("max_gradient_norm", "max_grad_norm clip clip_grad_norm grad_clip gradient_clip gradient_clipping clip_norm", ""),
    ("precision", "dtype compute_dtype mixed_precision amp autocast bf16", "give precision='16.32'"),
    ("precision", "fp16 float16", "give precision='16.32' and half='float16'"),
    ("loss_scale", "loss_scaling grad_scaler initial_loss_scaling scaler", ""),
    ("shard_optimizer", "zero zero1 zero_stage use_distributed_optimizer shard_optimizer_state optimizer_sharding", ""),
    ("ema_decay", "ema ema_rate average_decay polyak", ""),
    ("device_iterations", "iterations_per_loop steps_per_execution iterations unroll_steps", ""),
    ("on_nonfinite", "skip_nonfinite check_nan nan detect_anomaly terminate_on_nan", ""),
    ("donate", "donate_argnums donate_argnames donate_state", ""),
    ("rtol", "tolerance tol atol", ""),
)

# Per name that is gone: its new way.
_GONE: Final[dict[str, str]] = {
    "linen_stage nnx_stage equinox_stage gather_stages ModuleStage": (
        "a module is a function of its weights, Pipeline.from_function(loss, params, micro_batch, ipus=n); "
        "docs/tutorials/flax.md has a cell for each library"
    ),
    "from_layers": (
        "a list of layers is a loop in a function, Pipeline.from_function(loss, layers, micro_batch, ipus=n); "
        "layers_per_ipu= says where they go"
    ),
}

# Per argument: values elsewhere, and what to give here.
_VALUES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "precision": (
        (
            "bf16 bfloat16 bf16-mixed mixed_bfloat16 mixed half 16 amp true",
            "give '16.32', which computes in bfloat16 and keeps weights in float32.",
        ),
        ("fp16 float16 16-mixed mixed_float16", "give '16.32' with half='float16'."),
        ("fp32 float32 32 full false", "give '32.32'."),
    ),
    "half": (("bf16", "give 'bfloat16'."), ("fp16", "give 'float16'.")),
    "recompute": (("true full everything yes", "give 'all'."), ("false no never", "give 'none'.")),
    "reduction": (("avg average", "give 'mean'."),),
    "on_nonfinite": (("raise error true", "give 'stop'."), ("ignore continue", "give 'skip'.")),
}


def _plain(word: str) -> str:
    return word.replace("_", "").lower()


_MEANT: Final[dict[str, list[tuple[str, str]]]] = {}
for _name, _words, _text in _ROWS:
    for _word in _words.split():
        _MEANT.setdefault(_plain(_word), []).append((_name, _text))


def names_here(word: str) -> list[tuple[str, str]]:
    """Return what an argument is called here: names, each with a text to say in its place, if there is one.

    >>> names_here("numMicrobatches")
    [('gradient_accumulation', '')]
    """
    return _MEANT.get(_plain(word), [])


def value_here(name: str, value: object) -> str:
    """Return what to give in place of another library's value of an argument, or "" if that is not known.

    >>> value_here("recompute", True)
    "give 'all'."
    """
    word = str(getattr(value, "__name__", value)).lower()  # jnp.bfloat16 is a class
    return next((text for words, text in _VALUES.get(name, ()) if word in words.split()), "")


def gone(name: str) -> str:
    """Return ": " and the new way for a name that is gone, or "".

    >>> gone("nnx_stage")[:49], gone("Stage")
    (': a module is a function of its weights, Pipeline', '')
    """
    return next((f": {way}" for names, way in _GONE.items() if name in names.split()), "")


class Gone:
    """A method that is gone: it says the new way."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError(f"{owner.__name__!r} has no attribute {self.name!r}{gone(self.name)}")
