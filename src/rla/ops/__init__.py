"""The op and its backends."""

from .attend import State as State
from .attend import attend as attend
from .backends import backends as backends
from .checks import check as check
from .step import step as step
