"""Write whole weights to safetensors and npz files leaf by leaf, and read these files and files of other programs."""
