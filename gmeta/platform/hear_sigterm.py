"""Has a forked process hear SIGTERM, which its server does not: the server imports it first."""

import os
import signal

os.register_at_fork(
    after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
)
