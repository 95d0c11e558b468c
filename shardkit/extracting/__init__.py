"""Extracting: the samples of a dataset become files of a folder again."""
