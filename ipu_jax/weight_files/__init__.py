"""Write whole weights to safetensors and npz files leaf by leaf, and read them and those of other programs."""
