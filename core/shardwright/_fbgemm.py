"""The one place that knows whether FBGEMM's operators can be used.

FBGEMM is optional: everything runs without it, slower. It is imported on first use and never at import of
shardwright, because it takes about a second and because a build that does not fit the installed torch fails
in ways (undefined symbols, operators registered twice) that must not break those who do not need it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator


def available() -> bool:
    """True if FBGEMM's operators are there; imports FBGEMM when first asked.

    Returns:
        True if FBGEMM was imported and its operators are registered.
    """
    return _failure() is None


def reason() -> str | None:
    """Explain why FBGEMM cannot be used, for reports and error texts.

    Returns:
        The kind and text of the error that its import ended with, and of what that came from; None if it is available.
    """
    return _failure()


def serves(operator: str, device_type: str) -> bool:
    """True if FBGEMM brings a kernel of an operator for a kind of device.

    A build for CPUs only has no kernels for other devices, and its operators fail when they are called there. Within
    `torch.export` there are none: programs run where FBGEMM is not installed.

    Args:
        operator: The name without its namespace, such as `"jagged_to_padded_dense"`.
        device_type: As in `torch.device(...).type`.

    Returns:
        True if calling `torch.ops.fbgemm.<operator>` with tensors of that device runs FBGEMM's own kernel.
    """
    return available() and _has_kernel(operator, device_type) and not _is_exporting()


def _is_exporting() -> bool:
    import torch

    return torch.compiler.is_exporting()


@functools.cache
def _failure() -> str | None:
    try:
        import fbgemm_gpu  # noqa: F401  (its import registers the operators)
        import torch

        _ = torch.ops.fbgemm.asynchronous_complete_cumsum.default
    # OSError: a missing shared library or an undefined symbol. RuntimeError: an operator registered twice.
    # AttributeError: the package is there, its operators are not.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return " from ".join(_told(error))
    return None


def _told(error: BaseException | None) -> Iterator[str]:
    """An error and what it came from: torch names the library that it could not load, the loader the missing symbol."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__


@functools.cache
def _has_kernel(operator: str, device_type: str) -> bool:
    import torch

    key = torch._C._dispatch_key_for_device(device_type)
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{operator}", key))
    except RuntimeError:  # This version of FBGEMM has no such operator.
        return False
