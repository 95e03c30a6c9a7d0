"""What is measured of personal models, and how it is summarised."""
