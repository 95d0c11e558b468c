"""The loader for PyTorch, and the only importer of torch."""
