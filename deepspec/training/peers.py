"""What the processes of a run tell each other beside tensors: that one was asked to stop, and why one failed.

Stops are agreed on over a group of the hosts (gloo), so no device is waited for; a process that is gone is noticed
there at the next step boundary. It knows nothing of models or checkpoints.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch
from torch import distributed

from deepspec.errors import ConfigError, DeepSpecError
from deepspec.training.signals import StoppedError

_FAILURE = "deepspec_failure"
# How the back ends begin their complaints about a connection or a wait; they raise plain RuntimeErrors.
_LOST = ("gloo", "NCCL", "Connection", "Timed out", "timed out", "Broken pipe", "recv")


class LostPeerError(DeepSpecError):
    """Another process of the run is gone or no longer answers."""


class Peers:
    """The processes of the run, this one included; alone it does nothing.

    Args:
        timeout_seconds: how long an answer of the others may take.
    """

    def __init__(self, timeout_seconds: float) -> None:
        """Open the group; all processes must do so at the same point.

        Raises:
            ConfigError: they do not reach each other.
        """
        self._timeout_seconds = timeout_seconds
        self._group: distributed.ProcessGroup | None = None
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        try:
            self._group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise ConfigError(
                f"the processes of the run do not reach each other over gloo: {error}. Set GLOO_SOCKET_IFNAME to the "
                "network interface that joins their machines (`ip -brief address` lists them)."
            ) from error

    def largest(self, value: int) -> int:
        """The largest of all processes' values."""
        if self._group is None:
            return value
        shared = torch.tensor(value)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self._group)
        return int(shared)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tell the others why this process fails; where it fails because of another, say why that one did.

        Raises:
            LostPeerError: in place of the communication's own error.
        """
        try:
            yield
        except StoppedError:
            raise
        except Exception as failure:
            if self._group is None:
                raise
            if isinstance(failure, RuntimeError) and any(word in str(failure) for word in _LOST):
                raise LostPeerError(self._describe(failure)) from failure
            self._publish(failure)
            raise

    def _publish(self, failure: Exception) -> None:
        with contextlib.suppress(Exception):  # on the way out: the store may be gone with its process
            text = f"process {distributed.get_rank()} failed: {type(failure).__name__}: {failure}"
            distributed.distributed_c10d._get_default_store().set(_FAILURE, text)

    def _describe(self, failure: Exception) -> str:
        reason = ""
        with contextlib.suppress(Exception):
            store = distributed.distributed_c10d._get_default_store()
            if store.check([_FAILURE]):
                reason = store.get(_FAILURE).decode()
        if not reason:
            first = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
            reason = (
                f"one was killed, its machine is gone, or it did not answer for {self._timeout_seconds:g} s "
                f"(engine.timeout_seconds): {first}"
            )
        return (
            f"process {distributed.get_rank()} of {distributed.get_world_size()} lost the others: {reason}. "
            "The same command continues from the last checkpoint."
        )
