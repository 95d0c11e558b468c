"""Looking: which samples a dataset has, and what is in one of them."""
