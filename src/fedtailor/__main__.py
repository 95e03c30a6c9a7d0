"""`python -m fedtailor`."""

from fedtailor.cli.main import main

if __name__ == "__main__":
    main()
