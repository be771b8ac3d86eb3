"""Cut any JAX function into stages: `loss(params, micro_batch)` becomes a pipeline, unchanged."""
