"""`python -m exgrpo_cli.commands` is `exgrpo`."""

from exgrpo_cli.commands import main

if __name__ == "__main__":
    main()
