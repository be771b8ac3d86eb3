"""Host to device: which examples a batch holds, who reads them, and batches made ahead of their use."""
