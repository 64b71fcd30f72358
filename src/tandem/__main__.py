"""`python -m tandem`, the same as `kt`."""

from tandem.cli import main

if __name__ == "__main__":
    main()
