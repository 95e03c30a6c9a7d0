"""What tests of comparisons share."""

import pytest

from tests.small import one_after_the_other


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells run in a thread."""
    one_after_the_other(monkeypatch)
