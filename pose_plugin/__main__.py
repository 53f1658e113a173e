"""Run the command line as `python -m pose_plugin`."""

import sys

from pose_plugin.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
