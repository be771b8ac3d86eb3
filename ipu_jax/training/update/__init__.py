"""Make weight updates: micro-batches, replicas, precision, loss scale and optimizer."""
