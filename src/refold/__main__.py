"""`python -m refold` is `refold`."""

from refold.cli import main

if __name__ == "__main__":
    main()
