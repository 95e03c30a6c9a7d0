"""What a site answers to what it does not do."""

from __future__ import annotations

from fedtailor.errors import UserError


class Refused(UserError):
    """The site does not do what it was asked to."""
