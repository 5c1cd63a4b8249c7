"""Looks at the page in a headless Chromium: look.py BASE_URL OUT_DIR

Asks in the page, waits for the end of the answer, takes screenshots at 1280 and 390 pixels, light and dark, and
fails where the page logs an error, asks anybody else, or is wider than the window. Speaks the DevTools protocol
over a pipe and needs nothing but Python and Chromium.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

BASE, OUT = sys.argv[1], sys.argv[2]
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
if BROWSER is None:
    print("skipped: there is no chromium")
    sys.exit(0)


class Browser:
    """Messages end with a zero byte; file 3 of the browser is what it reads, 4 what it writes."""

    def __init__(self):
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()
        self.profile = tempfile.mkdtemp()
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={self.profile}"]

        def files():
            os.dup2(to_read, 13)
            os.dup2(to_write, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self.process = subprocess.Popen(command, preexec_fn=files, close_fds=False,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.number, self.buffer, self.events, self.session = 0, b"", [], None

    def message(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.read, 1 << 16)
            if not piece:
                raise RuntimeError("the browser is gone")
            self.buffer += piece
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        call = {"id": self.number, "method": method, "params": params}
        if self.session:
            call["sessionId"] = self.session
        os.write(self.write, json.dumps(call).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script, seconds=60):
        end = time.time() + seconds
        while not self.run(script):
            assert time.time() < end, f"never: {script}"
            time.sleep(0.1)

    def close(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


def look(browser, width, height, dark, name):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                 mobile=width < 600)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.call("Emulation.setEmulatedMedia", features=[scheme])
    browser.call("Page.navigate", url=BASE + "/")
    browser.wait("document.getElementById('state')?.className === 'idle'")
    # As a person does: with the keyboard.
    browser.run("document.getElementById('ask').focus()")
    browser.call("Input.insertText", text="Tell me a story about a *brave* fox.")
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **key)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **key)
    browser.wait("document.querySelector('.turn.assistant .text').textContent.length > 20")
    time.sleep(1.2)
    shoot(browser, f"{name}-working", False)
    browser.wait("!!document.querySelector('.turn.assistant .foot')", 120)
    assert browser.run("document.querySelectorAll('.fault').length") == 0
    assert browser.run("document.querySelector('.turn.user').textContent") == "Tell me a story about a *brave* fox."
    wide = browser.run("document.documentElement.scrollWidth")
    assert wide <= width, f"{name}: {wide} pixels wide in a window of {width}"
    shoot(browser, name, width < 600)
    # Stop: an answer that is cut says so, and the page can ask again.
    browser.run("document.querySelector('#max_tokens').value = 4000; document.getElementById('ask').focus()")
    browser.call("Input.insertText", text="Another.")
    browser.call("Input.dispatchKeyEvent", type="keyDown", **key)
    browser.wait("!document.getElementById('stop').hidden")
    browser.run("document.getElementById('stop').click()")
    browser.wait("document.getElementById('stop').hidden && !document.getElementById('send').hidden")


def shoot(browser, name, whole):
    shot = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
    with open(os.path.join(OUT, name + ".png"), "wb") as file:
        file.write(base64.b64decode(shot["data"]))


browser = Browser()
try:
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        browser.call(f"{domain}.enable")
    os.makedirs(OUT, exist_ok=True)
    for width, height, dark, name in [
        (1280, 860, False, "wide"), (1280, 860, True, "wide-dark"),
        (390, 844, False, "phone"), (390, 844, True, "phone-dark"),
    ]:
        look(browser, width, height, dark, name)
    for event in browser.events:
        method, params = event.get("method"), event.get("params", {})
        assert method != "Runtime.exceptionThrown", event
        assert method != "Log.entryAdded" or params["entry"]["level"] != "error", event
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            assert url.startswith((BASE, "data:", "about:")), url
finally:
    browser.close()
print("1 passed, 0 failed")
