"""Settings of the server, and their way to its worker processes."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Self

from attrs import asdict, field, frozen, validators

VARIABLE = "SHARDWRIGHT_SERVING"
"""Environment variable that brings the settings to a worker process, as JSON."""
END_CODE = 3
"""Exit code of a worker that cannot start, with which uvicorn ends the whole server."""
AT_LEAST_1 = validators.ge(1)


@frozen
class Settings:
    """Settings of a worker process.

    Attributes:
        package: folder of the package, or a link to it.
        program: form of the program to run: ``auto``, ``pt2``, ``exported`` or ``torchscript``.
        loader: ``MODULE:FUNCTION`` that loads the program instead, from the package's folder; "" for none.
        max_batch: most samples in a batch.
        max_wait_ms: longest time a request waits for others to join its batch, ms.
        max_queue: most samples that wait in one worker; a request beyond is answered with 503.
        max_request_bytes: largest body of a request.
        max_body_seconds: longest time in which the body of a request comes, s.
        poll_seconds: time between two looks for a newer package, s.
        threads: threads of torch in one worker; 0 for the cores divided by the workers.
        first: version of the package that the server was started with.
    """

    package: str = field(converter=str)
    program: str = "auto"
    loader: str = ""
    max_batch: int = field(default=256, validator=AT_LEAST_1)
    max_wait_ms: float = field(default=2.0, validator=validators.ge(0))
    max_queue: int = field(default=4096, validator=AT_LEAST_1)
    max_request_bytes: int = field(default=4 << 20, validator=AT_LEAST_1)
    max_body_seconds: float = field(default=10.0, validator=validators.gt(0))
    poll_seconds: float = field(default=1.0, validator=validators.gt(0))
    threads: int = field(default=0, validator=validators.ge(0))
    first: str = ""

    @property
    def folder(self) -> Path:
        """Folder of the package, links not followed."""
        return Path(self.package)

    def to_environment(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Hand the settings to processes that this one starts."""
        environment[VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """Take the settings that the process above handed down."""
        return cls(**json.loads(environment[VARIABLE]))
