# SPDX-License-Identifier: Apache-2.0
"""Every exception of this package.

    PDError
    ├── ConfigError      a value the user set is wrong; names the field and the fix
    ├── TransferError    a peer or a message of a peer is not acceptable
    ├── BackendError     a foreign library failed where no value can say so
    └── StateError       an event came that a state does not know: a bug; raised in tests only

Expected outcomes (a lease that expired, a read that failed) are values, not exceptions.
"""

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises of bytes that somebody else has sent or written."""
_MAX_BRIEF = 300


class PDError(Exception):
    """Base of all errors of vllm_ascend_pd."""


class ConfigError(PDError, ValueError):
    """A configuration value is wrong. The message names the field and the fix."""


class TransferError(PDError):
    """A peer's message or reference cannot be accepted."""


class BackendError(PDError):
    """A foreign library failed; mapped once, in ``vllm_ascend_pd.backends``."""


class StateError(PDError):
    """An event that cannot come in this state, see ``vllm_ascend_pd.states``."""


def brief(error: Exception) -> str:
    """What it says, on one line of a log: who has caused it may have chosen some of the words."""
    return repr(str(error))[1:-1][:_MAX_BRIEF]
