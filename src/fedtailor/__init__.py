"""fedtailor: personalized federated learning that learns what each client should share."""

__version__ = "0.1.0"
