"""The command that starts the server: ``python -m shardwright_serving PACKAGE``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwright_serving.packages.manifest import Manifest, PackageError
from shardwright_serving.server.settings import END_CODE, Settings

APP = "shardwright_serving.server.app:app_from_environment"
HEALTH_CHECK_S = 30
"""Time after which a worker that answers no ping is replaced, s: longer than torch takes to load on a busy machine."""


def serve(
    package: Annotated[Path, typer.Argument(help="Folder of the package, or a link to it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes; one that dies is replaced.")] = 2,
    threads: Annotated[
        int, typer.Option(min=0, help="Threads of torch in a worker; 0 for cores divided by workers.")
    ] = 0,
    max_batch: Annotated[int, typer.Option(min=1, help="Most samples in a batch, and in a request.")] = 256,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="Longest wait of a request for others.")] = 2.0,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Most samples that wait in a worker; then 503.")
    ] = 4096,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 4 << 20,
    max_body_seconds: Annotated[
        float, typer.Option(min=0.01, help="Longest time in which the body of a request comes; then 408.")
    ] = 10.0,
    poll_seconds: Annotated[
        float, typer.Option(min=0.01, help="Time between two looks for a newer package.")
    ] = 1.0,
    program: Annotated[
        Literal["auto", "pt2", "exported", "torchscript"],
        typer.Option(help="Program of the package to run; auto takes the first of them that loads."),
    ] = "auto",
    loader: Annotated[
        str, typer.Option(help="MODULE:FUNCTION that loads the program instead, given the package's folder.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="Level of uvicorn's log.")] = "info",
) -> None:
    """Serve an exported model over HTTP: POST /predict, GET /healthz, /readyz, /metrics, /docs."""
    try:
        first = Manifest.read(package.resolve()).version
    except PackageError as error:
        typer.echo(f"shardwright_serving: {error}", err=True)
        raise typer.Exit(2) from None
    settings = Settings(
        package.absolute(),
        program=program,
        loader=loader,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_queue=max_queue,
        max_request_bytes=max_request_bytes,
        max_body_seconds=max_body_seconds,
        poll_seconds=poll_seconds,
        threads=threads or max(1, (os.cpu_count() or 1) // workers),
        first=first,
    )
    raise typer.Exit(_run(settings, host=host, port=port, workers=workers, log_level=log_level))


def _run(settings: Settings, *, host: str, port: int, workers: int, log_level: str) -> int:
    """Run workers until the server is told to end, and replace those that die.

    Returns:
        exit code: 0, or that of a worker that could not start.
    """
    from uvicorn import Config
    from uvicorn.supervisors import Multiprocess

    settings.to_environment()
    config = Config(
        APP,
        factory=True,
        host=host,
        port=port,
        workers=workers,
        log_level=log_level,
        access_log=False,
        timeout_worker_healthcheck=HEALTH_CHECK_S,
    )
    with tempfile.TemporaryDirectory(prefix="shardwright-serving-") as folder:
        # The client library of Prometheus finds it when a worker imports it.
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
        # Not uvicorn.run(), which supervises no single worker, and returns 0 if none could start.
        supervisor = Multiprocess(config, sockets=[config.bind_socket()])
        supervisor.run()
    return END_CODE if any(one.exitcode == END_CODE for one in supervisor.processes) else 0


def main() -> None:
    """Run the command."""
    typer.run(serve)


if __name__ == "__main__":
    main()
