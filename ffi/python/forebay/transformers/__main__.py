"""`python -m forebay.transformers`: see `command`."""

import sys

from .command import main

sys.exit(main())
