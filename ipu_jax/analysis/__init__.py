"""What a model costs: FLOPs, bytes, an even split of its layers, and a report per IPU."""
