"""The report page of a real run in a real browser: all sections are there, and the page makes no network request."""

import re
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager

import pytest

from harness.jobs import LIMIT_S

pytestmark = pytest.mark.full

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# What the browser asks for itself, whatever page it shows: time, updates, accounts.
OWN = re.compile(rb"\b[\w.-]*\b(google|googleapis|gstatic)\.com\b")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-extensions", "--enable-logging=stderr",
)  # fmt: skip
SECTIONS = (
    "Summary", "Learning", "Speed", "One step", "Memory and bytes", "Energy", "Checkpoints", "Events", "Text sample",
    "Recipe", "Environment", "How it was measured",
)  # fmt: skip
RECIPE = (
    "run.steps=24", "model.layers=1", "model.hidden=32", "model.heads=2", "data.context=32", "run.global_batch=4",
    "checkpoint.every_steps=8", "communication.algorithm=ring", "energy.sources=declared", "energy.cpu_tdp_w=80",
    "energy.utilisation_s=0.05",
)  # fmt: skip


@contextmanager
def proxy():
    """Yield the port of a proxy that answers no request, and the list of requests: no byte leaves this machine."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    client, _ = server.accept()
                except OSError:  # closed
                    return
                with client:
                    client.settimeout(5)
                    try:
                        asked.append(client.recv(4096).partition(b"\r\n")[0])
                    except OSError:
                        asked.append(b"a connection that said nothing")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1], asked
        finally:
            server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def open_page(page, profile):
    """Open ``page`` in a browser. Return the DOM, the network requests and the console messages."""
    browser = next((result for name in BROWSERS if (result := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"there is no browser ({', '.join(BROWSERS)}): apt-get install chromium")
    with proxy() as (port, asked):
        through = [f"--proxy-server=http://127.0.0.1:{port}", "--proxy-bypass-list=<-loopback>"]
        line = [browser, *QUIET, *through, f"--user-data-dir={profile}", "--virtual-time-budget=2000"]
        done = subprocess.run([*line, "--dump-dom", page.as_uri()], capture_output=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        pytest.skip(f"the browser does not run here: {done.stderr.decode(errors='replace')[-500:]}")
    messages = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return done.stdout.decode(), [one for one in asked if not OWN.search(one)], "\n".join(messages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


@pytest.fixture
def page(folder, mpiexec):
    """The report page of a run of two ranks that was started twice."""
    run_dir, file = folder / "run", folder / "report.html"
    if not file.exists():
        words = [word for key in RECIPE for word in ("--set", key)]
        for more in (["--set", "run.steps=16"], ["--resume", "auto"]):
            done = mpiexec(2, ["-m", "hpcdist", "train", "--out", str(run_dir), *words, *more])
            assert done.returncode == 0, done.stdout
        done = mpiexec(1, ["-m", "hpcdist", "report", str(run_dir), "--html", str(file), "--sample-prompt", "class "])
        assert done.returncode == 0, done.stdout
    return file


def test_page_has_all_sections_of_the_run(page):
    text = page.read_text()
    for title in SECTIONS:
        assert f">{title}</h2>" in text
    assert re.search(r"after 24 of 24 steps", text) and ">finished</span>" in text
    charts = re.findall(r"<h3>([^<]*)</h3>\s*<div class=\"chart\"", text)
    assert charts == [
        "Loss", "Learning rate", "Throughput", "Time of a step by phase", "Compute time of each rank",
        "Timeline of a step", "Memory by category", "Bytes sent a step", "Power", "Energy so far", "Energy by phase",
        "Utilisation",
    ]  # fmt: skip
    assert "declared model, not measured" in text and "Vertical lines: 1 resume." in text
    assert "<b>class </b>" in text, "a sample of the model"
    assert re.search(r"start 2: finished", text) and "step-24" in text


def test_browser_shows_the_page_without_network_requests(page, tmp_path):
    dom, asked, complaints = open_page(page, tmp_path / "profile")
    for title in SECTIONS:
        assert f">{title}</h2>" in dom
    assert dom.count("<svg") == page.read_text().count("<svg") > 10
    assert asked == [] and complaints == ""


def test_network_requests_are_detected_and_the_policy_blocks_them(page, tmp_path):
    image = '<img src="http://example.invalid/a.png">'
    loose = tmp_path / "loose.html"
    loose.write_text(f"<!DOCTYPE html><title>loose</title>{image}")
    assert any(b"example.invalid" in one for one in open_page(loose, tmp_path / "one")[1])
    strict = tmp_path / "strict.html"
    strict.write_text(page.read_text().replace("<main>", f"<main>{image}", 1))
    dom, asked, complaints = open_page(strict, tmp_path / "two")
    assert "example.invalid" in dom and asked == [] and "Content Security Policy" in complaints
