"""A headless browser, driven as a person would: by the DevTools protocol over a pipe."""

import base64
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless=new --no-sandbox --disable-dev-shm-usage --no-first-run --mute-audio"


class Page:
    """One tab: `requests` has what it asked for, `errors` what its console complains of."""

    def __init__(self, process, reading, writing):
        self._process, self._reading, self._writing = process, reading, writing
        self._rest, self._number, self._session = b"", 0, None
        self.requests, self.errors = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a command; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def _message(self, patience=120):
        end = time.monotonic() + patience
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], end - time.monotonic())
            assert ready, "the browser does not answer"
            read = os.read(self._reading, 2**16)
            assert read, "the browser has ended"
            self._rest += read
        text, self._rest = self._rest.split(b"\0", 1)
        found = json.loads(text)
        about = found.get("params", {})
        match found.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(about["exceptionDetails"])
            case "Runtime.consoleAPICalled" if about["type"] == "error":
                self.errors.append(about["args"])
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(about["entry"])
        return found

    def open(self, address):
        """Open a page that is there once it has loaded."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState == 'complete' && location.href != 'about:blank'")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression, seconds=120):
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.1)
        return value

    def place(self, selector):
        """Return the box of an element that is scrolled into view: left, top, width, height."""
        return self.evaluate(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}});
            const box = element.getBoundingClientRect();
            return [box.left, box.top, box.width, box.height];
        }})()""")

    def mouse(self, kind, x, y):
        buttons = {"mousePressed": 1, "mouseMoved": 1, "mouseReleased": 0}[kind]
        self.call(
            "Input.dispatchMouseEvent",
            **{"type": kind, "x": x, "y": y, "button": "left", "buttons": buttons, "clickCount": 1},
        )

    def click(self, selector):
        left, top, width, height = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, left + width / 2, top + height / 2)

    def drag(self, selector, strokes):
        """Draw lines through points, which are shares of an element's width and height."""
        left, top, width, height = self.place(selector)
        for stroke in strokes:
            points = [(left + x * width, top + y * height) for x, y in stroke]
            self.mouse("mousePressed", *points[0])
            for point in points:
                self.mouse("mouseMoved", *point)
            self.mouse("mouseReleased", *points[-1])

    def key(self, key, code=0, text=""):
        about = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **about)

    def screenshot(self, path):
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def opened(folder, *flags):
    """Start a browser; downloads go to `folder`."""
    (to_browser, writing), (reading, from_browser) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
    for end in (to_browser, from_browser):
        os.close(end)
    command = [PATH, *FLAGS.split(), *flags, f"--user-data-dir={folder / 'profile'}"]
    script = 'exec "$@" 3<&{} 4>&{}'.format(*ends)  # where it reads and writes
    process = subprocess.Popen(
        ["bash", "-c", script, "chromium", *command, "--remote-debugging-pipe", "about:blank"],
        pass_fds=ends,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    for end in ends:
        os.close(end)
    try:
        page = Page(process, reading, writing)
        page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        yield page
    finally:
        process.terminate()
        process.wait()
        os.close(reading)
        os.close(writing)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(folder):
    """Serve a folder as `python -m http.server` does; give its address."""
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
