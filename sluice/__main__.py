"""`sluice`, and `python -m sluice`: Ctrl-C is an end without a trace, while modules load too."""

import sys

from sluice.output import guard_output


def main() -> int:
    guard_output()
    try:
        from sluice import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
