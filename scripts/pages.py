#!/usr/bin/env python3
"""Look at the pages of Slipstream in a headless Chromium.

pages.py axe AXE_JS       check every page by axe-core and by its layout; exits 1 if a finding is serious or critical
pages.py picture FILE     write a picture of `/ui` under load as PNG, for the README; it shows no version
pages.py notebook FILE    check that a notebook's page, made by nbconvert, draws its charts and tables
pages.py fresh FILE       say so if the picture was made from another page than the tree's

SLIPSTREAM_BIN names the binary (default: target/release/slipstream), CHROMIUM the browser.
Exits 77 with a message where there is no browser.
"""

import base64
import contextlib
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60
SERIOUS = ("serious", "critical")
# Load before the picture, at its real pace, so that a busy host keeps time.
LOADED_S = 60

# The files of the page that is shown.
PAGE = sorted(ROOT.glob("crates/*/*/assets/ui*"))
# Bytes of a PNG file before its second chunk: signature and IHDR.
HEADER = 8 + 25


class Browser:
    """A Chromium that takes commands through a pipe."""

    def __init__(self, folder):
        name = os.environ.get("CHROMIUM") or next(filter(shutil.which, BROWSERS), None)
        if name is None:
            print("skipped: no Chromium (Debian: apt-get install chromium)", file=sys.stderr)
            sys.exit(77)
        (there, write), (read, here) = os.pipe(), os.pipe()
        command = [name, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder}"]
        # The browser reads commands from descriptor 3 and writes answers to 4.
        shell = f'exec "$@" 3<&{there} 4>&{here}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(there, here),
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        self.commands, self.answers = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        self.number = 0
        # What pages wrote to the console as an error.
        self.complaints = []
        target = self.ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        self.session = self.ask("Target.attachToTarget", attach)["sessionId"]
        self.ask("Page.enable", session=True)
        self.ask("Runtime.enable", session=True)
        self.ask("Log.enable", session=True)
        # The check is injected; the pages allow no script but their own.
        self.ask("Page.setBypassCSP", {"enabled": True}, session=True)

    def ask(self, method, params=None, session=False):
        """Send a command, and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = json.loads(self.message())
            if answer.get("id") != self.number:
                self.note(answer)
                continue
            if "error" in answer:
                sys.exit(f"{method}: {answer['error']['message']}")
            return answer["result"]

    def note(self, event):
        """Keep an event that says that the page has an error."""
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("text", "exception"))
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(" ".join(str(a.get("value")) for a in params["args"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    def message(self):
        """Read the next message."""
        data = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            if not byte:
                sys.exit("the browser ended")
            data += byte
        return bytes(data)

    def show(self, url, width, height, dark=False):
        """Load a page at this size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", size, session=True)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", {"features": scheme}, session=True)
        self.ask("Page.navigate", {"url": url}, session=True)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression):
        """Return the value of an expression on the page."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = self.ask("Runtime.evaluate", params, session=True)
        if "exceptionDetails" in result:
            sys.exit(f"on the page: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression):
        """Wait until an expression holds."""
        begun = time.monotonic()
        while not self.evaluate(expression):
            if time.monotonic() - begun > PATIENCE_S:
                sys.exit(f"{expression} does not hold after {PATIENCE_S} s")
            time.sleep(0.1)

    def close(self):
        """End the browser."""
        self.ask("Browser.close")
        self.process.wait(PATIENCE_S)


def slipstream():
    """Return the binary to run."""
    return os.environ.get("SLIPSTREAM_BIN") or str(ROOT / "target/release/slipstream")


@contextlib.contextmanager
def serving(*flags):
    """Serve on a free port; yields the address."""
    command = [slipstream(), "serve", "--listen=127.0.0.1:0", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait()


def reports(folder):
    """Write a page of each kind; yields name and address."""
    small = ["--isl=256", "--osl=64", "--requests=200"]
    commands = {
        "run": ["simulate", "examples/cluster.toml", "--rate=20", *small],
        "sweep": ["sweep", "--vary=pool.main.workers=1..3", "--rate=20", *small],
        "plan": [
            "plan",
            "examples/plan.workload.toml",
            "--model=llama-3.1-8b",
            "--gpus=h100-sxm",
            "--quick",
        ],
        "net": ["net", "run", "examples/net/web-search.toml"],
    }
    for name, command in commands.items():
        page = Path(folder) / f"{name}.html"
        ran = subprocess.run(
            [slipstream(), *command, f"--html={page}"], cwd=ROOT, capture_output=True, text=True
        )
        if not page.exists():
            sys.exit(f"{' '.join(command)}: {ran.stderr}")
        yield name, page.as_uri()


# What is cut off, or too small to read; the smallest text of charts is 9 px.
LAYOUT = """({
    "wider than the window": document.documentElement.scrollWidth > innerWidth + 1,
    "a table is cut": [...document.querySelectorAll('.wide')].some(
        box => box.scrollWidth > box.clientWidth + 1),
    "text of a chart is below 9 px": [...document.querySelectorAll('svg')].some(svg => {
        const scale = svg.getScreenCTM()?.a ?? 1;
        return [...svg.querySelectorAll('text')].some(text =>
            text.getClientRects().length > 0
            && parseFloat(getComputedStyle(text).fontSize) * scale < 9);
    }),
    "a series cannot be hidden": [...document.querySelectorAll('figure.chart')].some(figure => {
        const key = figure.querySelector('.legend [data-line]');
        if (!key) return false;
        const line = figure.querySelector(`g[data-line="${key.dataset.line}"]`);
        key.click();
        const is_hidden = getComputedStyle(line).display === 'none';
        key.click();
        return !is_hidden || getComputedStyle(line).display === 'none';
    }),
    "a state takes several lines": [...document.querySelectorAll('.fleet em')].some(state => {
        const text = document.createRange();
        text.selectNodeContents(state);
        return text.getClientRects().length > 1;
    }),
})"""


def check(browser, axe, name, url):
    """Return the number of serious findings on a page, after naming them."""
    serious = 0
    for width, dark in ((1280, False), (1280, True), (390, False)):
        browser.show(url, width, 900, dark)
        time.sleep(2.5)  # the page draws, and polls again
        wrong = [what for what, holds in browser.evaluate(LAYOUT).items() if holds]
        wrong += [f"console: {text}" for text in browser.complaints]
        browser.complaints.clear()
        for what in wrong:
            print(f"{name}, {width} px: {what}")
        serious += len(wrong)
        browser.evaluate(axe)
        options = json.dumps({"resultTypes": ["violations"]})
        found = browser.evaluate(f"axe.run(document, {options}).then(r => r.violations)")
        for finding in found:
            nodes = [" ".join(node["target"]) for node in finding["nodes"][:3]]
            mode = "dark" if dark else "light"
            print(f"{name}, {width} px, {mode}: {finding['impact']}: {finding['help']}: {nodes}")
            serious += finding["impact"] in SERIOUS
    return serious


def main_axe(axe):
    """Check every page."""
    code = Path(axe).read_text(encoding="utf-8") + "\n;0"
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(f"{folder}/browser")
        serious = pages = 0
        with serving("--speedup=0") as address:
            pages += 1
            serious += check(browser, code, "/ui", f"{address}/ui")
            # Of a router, by the way that a browser finds it; nothing is at the second address.
            name = "vllm-main-7d4b9c6f5-x2x9q.vllm-main.production-inference.svc.localhost:9"
            with serving(f"--engine={address}", f"--engine=http://{name}") as router:
                pages += 1
                serious += check(browser, code, "/ui of a router", f"{router}/")
                browser.show("about:blank", 1280, 900)  # the page would miss its server
        for name, url in reports(folder):
            pages += 1
            serious += check(browser, code, name, url)
        browser.close()
    print(f"{pages} pages, {serious} serious findings")
    return 1 if serious else 0


def main_picture(file):
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(f"{folder}/browser")
        with serving("examples/cluster.toml") as address:
            browser.show(f"{address}/ui", 1280, 860)
            load = [slipstream(), "bench", address, "-w", "examples/chat.workload.toml"]
            load += ["--seed=1", f"--duration={LOADED_S}s"]
            process = subprocess.Popen(load, cwd=ROOT, stdout=subprocess.DEVNULL)
            time.sleep(LOADED_S - 5)
            # A version in a picture would be an old one soon.
            browser.evaluate(
                "document.getElementById('what').textContent = "
                "document.getElementById('what').textContent.replace(/, version .*/, '')"
            )
            shot = browser.ask("Page.captureScreenshot", {"format": "png"}, session=True)
            process.kill()
            process.wait()
        browser.close()
    png = base64.b64decode(shot["data"])
    Path(file).write_bytes(png[:HEADER] + digest_chunk() + png[HEADER:])
    return 0


DRAWN = """({
    charts: [...document.querySelectorAll('.js-plotly-plot')].map(chart => {
        const box = chart.getBoundingClientRect();
        return chart.querySelectorAll('.main-svg').length > 0 && box.height > 150
            && box.width > 200 && box.right <= innerWidth + 1;
    }),
    tables: [...document.querySelectorAll('.jp-OutputArea table')].map(
        table => getComputedStyle(table).fontFamily.includes('monospace')),
    frames: document.querySelectorAll('iframe').length,
    overflow: document.documentElement.scrollWidth > innerWidth + 1,
})"""


def main_notebook(file):
    """Check a page; exits 1 with what is wrong."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(f"{folder}/browser")
        for width in (1280, 800):
            browser.show(Path(file).resolve().as_uri(), width, 900)
            browser.wait("document.querySelectorAll('.main-svg').length > 0")
            found = browser.evaluate(DRAWN)
            print(f"{width} px: {len(found['charts'])} charts, {len(found['tables'])} tables")
            if not found["charts"] or not all(found["charts"]):
                wrong.append(f"{width} px: a chart is not drawn, or cut: {found['charts']}")
            if not found["tables"] or not all(found["tables"]):
                wrong.append(f"{width} px: a table is proportional: {found['tables']}")
            if found["frames"] or found["overflow"]:
                wrong.append(f"{width} px: a frame, or wider than the window: {found}")
        browser.close()
    print("\n".join(wrong))
    return 1 if wrong else 0


def digest_chunk():
    """Return a text chunk of a PNG file with the digest of the page that is shown."""
    data = b"page\0" + hashlib.sha256(b"".join(map(Path.read_bytes, PAGE))).hexdigest().encode()
    checked = b"tEXt" + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def main_fresh(file):
    """Compare the digest in a picture with the page."""
    if digest_chunk() not in Path(file).read_bytes():
        print(
            f"note: {file} was made from another page: scripts/pages.py picture {file}",
            file=sys.stderr,
        )
    return 0


def main():
    """Run what the arguments say."""
    actions = {"axe": main_axe, "picture": main_picture, "fresh": main_fresh}
    actions["notebook"] = main_notebook
    if len(sys.argv) != 3 or sys.argv[1] not in actions:
        print(__doc__, file=sys.stderr)
        return 2
    return actions[sys.argv[1]](sys.argv[2])


if __name__ == "__main__":
    sys.exit(main())
