"""Every error the package raises on purpose.

    MpisimError
    +-- ConfigError (also ValueError)     the user's file, option or layout is wrong
    +-- PlanError                         a plan breaks a rule of plan/check.py
    |   +-- DeadlockError                 its ranks would wait for each other for ever
    +-- MemoryBudgetExceeded              an allocation would pass the budget
    +-- BatchError (also ValueError)      a microbatch is not what its plan or its model says
    +-- RecomputeMismatch                 a replayed forward differs from the first one
    +-- LossScaleError                    the loss scale reached its floor
    +-- CommError                         a message or a peer went wrong
    |   +-- CommTimeout                   a peer did not answer in time
    |   +-- PeerLost                      a peer is gone
    |   +-- MessageMismatch               a peer sent another length, dtype or channel
    +-- CheckpointError                   a file on disk cannot be used

Messages follow one form: ``<thing> must <rule>; got <value>. <what to do>.``
This module imports nothing of the package, so every layer may use it.
"""

from __future__ import annotations


class MpisimError(Exception):
    """Base of all errors raised on purpose; its text is fit to be shown to a user."""


class ConfigError(MpisimError, ValueError):
    """A config file, an option or a layout breaks a rule; nothing was started."""


class PlanError(MpisimError):
    """A plan breaks a rule that `plan.check` proves before anything runs."""


class DeadlockError(PlanError):
    """The ranks of a plan would wait for each other for ever."""


class MemoryBudgetExceeded(MpisimError):
    """An allocation would pass the byte budget of a rank; `facts` say what was held, and where."""

    def __init__(self, text: str, **facts: object) -> None:
        super().__init__(text)
        self.facts = facts


class BatchError(MpisimError, ValueError):
    """A microbatch is not what its plan or its model says; the update was not made."""


class RecomputeMismatch(MpisimError):
    """A replayed forward differs in some bit from the first one: its gradients would be wrong."""


class LossScaleError(MpisimError):
    """Steps were skipped until the loss scale reached its floor."""


class CommError(MpisimError):
    """A message or a peer went wrong while a job was running."""


class CommTimeout(CommError):
    """A peer did not answer within the transport's `timeout_s` seconds."""


class PeerLost(CommError):
    """A peer ended, or was lost, while messages to or from it were pending."""


class MessageMismatch(CommError):
    """A message arrived with another length, dtype or channel than was expected."""


class CheckpointError(MpisimError):
    """A file on disk is missing, damaged or not what its name says."""
