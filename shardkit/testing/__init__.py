"""Test kit that ships with the package: trees of photographs, contract suites, scripted faults."""
