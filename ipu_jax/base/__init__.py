"""What every folder may import, and what imports none of them: types, checks, jaxprs, keys, files, the command line."""
