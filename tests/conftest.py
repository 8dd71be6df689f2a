"""A test that leaves something behind fails: see tests/support/leaks.py."""

pytest_plugins = ["tests.support.leaks"]
