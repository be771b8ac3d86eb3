"""Feed batches from the host to the IPUs: order of examples, sources, prefetching, and the feed itself."""
