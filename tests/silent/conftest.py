"""The command line, as the tests of it call it."""

from tests.cli.conftest import call

__all__ = ["call"]
