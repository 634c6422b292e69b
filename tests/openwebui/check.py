"""Open WebUI in a headless Chromium against `isthmus serve demo`: `make openwebui`.

What is held: the model is in the list; an answer is seen growing; the title that Open WebUI asks for is
answered and stands in the sidebar; the same with Open WebUI's "direct connection", where the web page itself
asks the server across origins; and nothing that was asked had an error for an answer. Pages cost seconds and
the network nothing: models of Open WebUI's own, its telemetry and its look for updates are off.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    from PIL import Image
    from playwright.sync_api import Page, sync_playwright
    from recorder import Exchange, Recorder

    VERSION = importlib.metadata.version("open-webui")
except ImportError as error:
    sys.exit(f"{error}; `make openwebui` installs what this needs into build/openwebui and runs it there")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUESTION = "Why is the sky blue?"
TITLE_TASK = "Generate a concise title"  # how Open WebUI's prompt for one begins
PATIENCE_S = 300.0  # a hang, not a measure
SCREENSHOT_BYTES = 150_000
FAILED = Path(sys.prefix) / "failed.png"

# The model is small: a schema makes its answer a title, and these draw one that stands not in the prompt.
TITLE = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 3, "maxLength": 40}},
    "required": ["title"],
    "additionalProperties": False,
}
TASK_PARAMS = {
    "temperature": 0.8,
    "seed": 15,
    "max_tokens": 60,
    "response_format": {"type": "json_schema", "json_schema": {"name": "title", "schema": TITLE}},
    "custom_params": {"repetition_penalty": 1.1},
}
ENVIRONMENT = {
    "WEBUI_AUTH": "false",
    "WEBUI_SECRET_KEY": "of one run",
    "USE_SLIM_DOCKER": "true",  # without embeddings, speech and a vector store
    "OFFLINE_MODE": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "ENABLE_OLLAMA_API": "false",
    "ENABLE_DIRECT_CONNECTIONS": "true",
    "ENABLE_TAGS_GENERATION": "false",  # they share the title's parameters, and so its schema
    "ENABLE_FOLLOW_UP_GENERATION": "false",
    "TASK_MODEL_PARAMS": json.dumps(TASK_PARAMS),
}


class Failed(Exception):
    """What was looked for and is not so, in one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--isthmus", default="isthmus", help="the command whose `serve demo` is asked")
    parser.add_argument("--browser", help="path of a Chromium; default: the first found on PATH")
    parser.add_argument("--screenshot", type=Path, help="a PNG to write")
    arguments = parser.parse_args()
    try:
        run(arguments.isthmus, arguments.browser, arguments.screenshot)
    except Failed as failure:
        sys.exit(f"FAILED: {failure}")


def run(isthmus: str, browser: str | None, screenshot: Path | None) -> None:
    browser = browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or shutil.which(browser) is None:
        looked = browser or ", ".join(BROWSERS)
        raise Failed(f"no browser ({looked}): install Debian's package chromium, or name one with --browser")
    if shutil.which(isthmus) is None:
        raise Failed(f"no command {isthmus!r}: `make build` makes .venv/bin/isthmus, --isthmus names another")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openwebui-")))
        page_url = f"http://127.0.0.1:{free_port()}"
        server = stack.enter_context(serving_demo(isthmus, folder, page_url))
        recorder = stack.enter_context(Recorder(server))
        stack.enter_context(open_webui(folder, page_url, recorder.url))
        configure(page_url, recorder.url)
        page = stack.enter_context(chromium(browser))

        listed(page, page_url, "demo")
        chat(page, recorder, origin="")
        titled(page, recorder)
        if screenshot is not None:
            take(page, screenshot)
        listed(page, page_url, "browser.demo")
        chat(page, recorder, origin=page_url)

        for exchange in recorder.exchanges:
            print(exchange)
            if not 200 <= exchange.status < 300:
                raise Failed(f"{exchange}: {exchange.answer[:500].decode(errors='replace')}")
    print(f"Open WebUI {VERSION}: the list of models, a streamed answer, its title, a direct connection")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[Callable[[], str]]:
    """A program and, as a function, what it has said so far; Failed with its last lines once it has ended."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)

    def said() -> str:
        text = log.read_text(errors="replace")
        if process.poll() is not None:
            last = "\n".join(text.splitlines()[-15:])
            raise Failed(f"{command[0]} ended with {process.returncode}:\n{last}")
        return text

    try:
        yield said
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(what: str, ready: Callable[[], Any], every_s: float = 0.05) -> Any:
    """The first value of `ready` that is true; Failed after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not (value := ready()):
        if time.monotonic() > end:
            raise Failed(f"waited {PATIENCE_S:g} s in vain for {what}")
        time.sleep(every_s)
    return value


@contextmanager
def serving_demo(isthmus: str, folder: Path, page_url: str) -> Iterator[str]:
    """The address of a server that pages of `page_url` may ask."""
    command = [isthmus, "serve", "demo", "--port", "0", "--ctx", "4096", "--cors-origin", page_url]
    with running(command, folder / "isthmus.log") as said:
        found = wait_for("the server", lambda: re.search(r"is ready at (\S+)/v1", said()))
        yield found[1]


@contextmanager
def open_webui(folder: Path, url: str, server: str) -> Iterator[None]:
    """Open WebUI at `url`, with its data in `folder` and `server` for its one connection."""
    port = url.rpartition(":")[2]
    command = [
        str(Path(sys.executable).with_name("open-webui")),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    env = os.environ | ENVIRONMENT | {"DATA_DIR": str(folder), "CORS_ALLOW_ORIGIN": url}
    env |= {"OPENAI_API_BASE_URL": f"{server}/v1", "OPENAI_API_KEY": "none"}

    with running(command, folder / "open-webui.log", env) as said:

        def answers() -> bool:
            said()
            try:
                return bool(call(url, "GET", "/health")["status"])
            except OSError:
                return False

        wait_for("Open WebUI", answers)
        yield


def call(url: str, method: str, path: str, body: Any = None, token: str = "") -> Any:
    """One request to Open WebUI's own interface."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def configure(url: str, server: str) -> None:
    """The user's settings: no news at the start, short answers, and a direct connection beside the other."""
    token = call(url, "POST", "/api/v1/auths/signin", {"email": "", "password": ""})["token"]
    interface = {
        "version": VERSION,
        # Not legacy: each request would describe Open WebUI's own tools in 7,000 tokens.
        "params": {"temperature": 0, "max_tokens": 120, "function_calling": "legacy"},
        "directConnections": {
            "OPENAI_API_BASE_URLS": [f"{server}/v1"],
            "OPENAI_API_KEYS": ["none"],
            "OPENAI_API_CONFIGS": {"0": {"enable": True, "prefix_id": "browser"}},
        },
    }
    call(url, "POST", "/api/v1/users/user/settings/update", {"ui": interface}, token)


@contextmanager
def chromium(path: str) -> Iterator[Page]:
    """A page of 1200 x 720 in a browser that speaks to no other host by itself."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            chromium_sandbox=os.geteuid() != 0,  # which root has none of
            args=["--disable-background-networking", "--disable-component-update", "--disable-sync"],
        )
        page = browser.new_page(viewport={"width": 1200, "height": 720})
        page.set_default_timeout(PATIENCE_S * 1e3)
        try:
            yield page
        except BaseException:
            page.screenshot(path=FAILED)
            print(f"the page as it was then: {FAILED}")
            raise
        finally:
            browser.close()


def listed(page: Page, url: str, model: str) -> None:
    """Opens a new chat and chooses `model` from the list."""
    page.goto(url)
    page.locator("#model-selector-model-button").click()
    page.get_by_role("option", name=f"Select {model} model", exact=True).click()


def chat(page: Page, recorder: Recorder, origin: str) -> None:
    """Asks, sees the answer grow, and finds that it is what the server streamed to `origin`."""
    page.locator("#chat-input").fill(QUESTION)
    page.keyboard.press("Enter")
    shown = [""]
    answers = page.locator(".chat-assistant")

    def text() -> str:
        return answers.last.inner_text().strip() if answers.count() else ""

    def complete() -> bool:
        if shown[-1] != (now := text()):
            shown.append(now)
        return page.locator(".copy-response-button").count() > 0  # stands below an answer that is whole

    wait_for("an answer", complete)
    growing = sum(len(before) < len(after) for before, after in pairwise(shown))
    if growing < 5:
        raise Failed(f"the answer did not grow on the page, it came in {growing} pieces: {shown[-1]!r}")
    streams = [each for each in chats_of(recorder) if each.asked.get("stream") and each.origin == origin]
    if len(streams) != 1:
        raise Failed(f"one stream was to be asked for, it was {len(streams)}: {[*map(str, streams)]}")
    content = "".join(
        choice["delta"].get("content") or ""
        for line in streams[0].answer.decode().splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
    )
    wait_for(f"the page to show all of {content!r}", lambda: words(text()) == words(content))


def titled(page: Page, recorder: Recorder) -> None:
    """The title that the server answered with stands in the sidebar, beside the chat's link."""

    def answered() -> Exchange | None:
        asked = [each for each in chats_of(recorder) if TITLE_TASK in each.request.decode()]
        return next((each for each in asked if each.ended), None)

    task = wait_for("the title's request", answered)
    if task.status != 200:
        raise Failed(f"{task}: {task.answer.decode(errors='replace')}")
    title = json.loads(json.loads(task.answer)["choices"][0]["message"]["content"])["title"]
    page.get_by_role("button", name="Open Sidebar").first.click()
    item = page.locator(f'[data-sidebar-chat-id="{page.url.rpartition("/")[2]}"] a [dir=auto]')
    wait_for(f"the title {title!r} in the sidebar", lambda: words(item.inner_text()) == words(title))


def chats_of(recorder: Recorder) -> list[Exchange]:
    return [
        each for each in recorder.exchanges if (each.method, each.path) == ("POST", "/v1/chat/completions")
    ]


def words(text: str) -> list[str]:
    """What stays of a text when it is laid out."""
    return re.findall(r"\w+", text)


def take(page: Page, path: Path) -> None:
    """The page as a PNG of a palette: a quarter of the size, and nobody sees it."""
    page.mouse.move(700, 500)
    page.wait_for_timeout(1000)  # the sidebar slides in
    page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > SCREENSHOT_BYTES:
        raise Failed(f"{path} has {path.stat().st_size} bytes, more than {SCREENSHOT_BYTES}")


if __name__ == "__main__":
    main()
