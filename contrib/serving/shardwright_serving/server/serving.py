"""The package that a worker serves, and its replacement by a newer one while requests go on."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from pathlib import Path

from attrs import frozen

from shardwright_serving.packages.manifest import Manifest, PackageError, state_of
from shardwright_serving.packages.patches import patches_of, read_patch
from shardwright_serving.server.batcher import Batcher
from shardwright_serving.server.metrics import Metrics
from shardwright_serving.server.programs import LoadedProgram, load_program
from shardwright_serving.server.requests import RequestReader
from shardwright_serving.server.settings import Settings

LOG = logging.getLogger("uvicorn.error")  # which uvicorn shows


@frozen(eq=False)
class Served:
    """A loaded package, with the reader and the queue of its requests.

    Attributes:
        folder: folder of the package.
        manifest: manifest of the package.
        program: its program.
        reader: reader of requests.
        batcher: queue of requests.
        patches: patches of its rows that the program has.
    """

    folder: Path
    manifest: Manifest
    program: LoadedProgram
    reader: RequestReader
    batcher: Batcher
    patches: set[Path]


class Serving:
    """The package served now.

    A request is read and answered by one package, even if a newer one is taken meanwhile. The older one ends when
    it has answered all that it took.

    Args:
        settings: settings of the worker.
        executor: threads that compute; packages share them.
        metrics: metrics of the worker.
    """

    def __init__(self, settings: Settings, executor: Executor, metrics: Metrics) -> None:
        self._settings = settings
        self._executor = executor
        self._metrics = metrics
        self._state: tuple[object, ...] = ()
        self._closing: set[asyncio.Task[None]] = set()
        self.current: Served | None = None

    async def take(self) -> None:
        """Load the package that is there now, and serve it.

        Raises:
            PackageError: it cannot be served; what was served before still is.
        """
        self._state = state_of(self._settings.folder)
        # A link that moves while it is read does not mix two packages; a folder that is replaced is seen.
        folder = self._settings.folder.resolve()
        before = state_of(folder)
        try:
            manifest, patches = Manifest.read(folder), set(patches_of(folder))
            program = await asyncio.to_thread(load_program, folder, manifest, self._settings)
            reader = RequestReader(manifest)
            if state_of(folder) != before:
                raise PackageError(
                    f"{folder} was changed while it was loaded: it is taken when all of it is there"
                )
        except PackageError:
            self._metrics.package_loads.labels("failed").inc()
            raise
        # A patch that came while rows were mapped may be among them: it is taken once more, which changes nothing.
        self._serve(folder, manifest, reader, program, patches)

    async def watch(self) -> None:
        """Look for a newer package for ever. One that cannot be served is told once, and looked at when it changes."""
        while True:
            await asyncio.sleep(self._settings.poll_seconds)
            if state_of(self._settings.folder) != self._state:
                await self._take_if_good()
            try:
                await self._patch()
            except Exception:  # the watch must go on
                LOG.exception("a patch of rows is not taken")

    async def _patch(self) -> None:
        """Take over all new patches of rows, between two batches."""
        served = self.current
        if served is None:
            return
        new = [path for path in patches_of(served.folder) if path not in served.patches]
        if new:
            patches = [await asyncio.to_thread(read_patch, path) for path in new]
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, served.program.patch, patches)
            served.patches.update(new)
            LOG.info("the rows of package %s have the patch %s", served.manifest.version, new[-1].name)

    async def close(self) -> None:
        """Answer what waits, then end."""
        if self.current is not None:
            await self.current.batcher.close()
        await asyncio.gather(*self._closing)

    async def _take_if_good(self) -> None:
        try:
            await self.take()
        except PackageError as error:
            LOG.error("the newer package is not taken: %s", error)
        except Exception:  # the watch must go on
            LOG.exception("the newer package is not taken")

    def _serve(
        self,
        folder: Path,
        manifest: Manifest,
        reader: RequestReader,
        program: LoadedProgram,
        patches: set[Path],
    ) -> None:
        before = self.current
        if before is not None:
            self._metrics.workers.labels(before.manifest.version).set(0)
            self._end(before)
        batcher = Batcher(program.predict, self._executor, self._settings, self._metrics)
        self.current = Served(folder, manifest, program, reader, batcher, patches)
        self._metrics.package_loads.labels("taken").inc()
        self._metrics.workers.labels(manifest.version).set(1)
        LOG.info("serving package %s", manifest.version)

    def _end(self, served: Served) -> None:
        """End what was served, behind the requests that it has taken."""
        ending = asyncio.get_running_loop().create_task(served.batcher.close())
        self._closing.add(ending)
        ending.add_done_callback(self._closing.discard)
