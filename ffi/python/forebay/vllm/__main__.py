"""`python -m forebay.vllm`: see `command`."""

import sys

from .command import main

sys.exit(main())
