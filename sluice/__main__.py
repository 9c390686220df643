"""`sluice`, and `python -m sluice`: Ctrl-C is an end without a trace, while modules load too."""

import sys


def main() -> int:
    try:
        from sluice import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
