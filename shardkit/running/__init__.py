"""What long runs have in common: worker processes, and a journal of what is finished."""
