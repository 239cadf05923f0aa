"""`python -m exgrpo_cli` is `exgrpo`."""

from exgrpo_cli.main import main

if __name__ == "__main__":
    main()
