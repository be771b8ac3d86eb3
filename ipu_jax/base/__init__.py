"""What every folder may import, and what imports none of them: checks, jaxprs, keys, files, the command line."""
