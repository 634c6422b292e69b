"""`python -m isthmus` is the command `isthmus`."""

from isthmus.cli.main import main

if __name__ == "__main__":
    main()
