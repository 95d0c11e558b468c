"""A tree or a list of JPEGs becomes a dataset."""
