"""One weight update: micro-batches, replicas, precision, loss scale, optimizer."""
