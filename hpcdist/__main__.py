"""``python -m hpcdist`` is the ``hpcdist`` command."""

from hpcdist.cli.main import main

if __name__ == "__main__":
    main()
