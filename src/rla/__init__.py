"""Residual linear attention: linear attention with a second state that fits, and corrects, the errors of the first."""

from .method import METHODS as METHODS
from .method import Method as Method
from .ops import State as State
from .ops import attend as attend
from .ops import backends as backends
from .ops import check as check
from .ops import step as step

__version__ = "0.1.0"
