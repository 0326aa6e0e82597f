# Made at the wheel's build from ffi/include/forebay.h.
from typing import Any

ffi: Any
