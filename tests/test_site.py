# SPDX-License-Identifier: Apache-2.0
"""The site of docs/ as MkDocs builds it, and in a browser.

Wants the extra `docs`, and for pages in a browser `chromium`; skipped where they are missing.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm

import tvm_ipc
from tvm_ipc.packed_functions import KINDS

ROOT = Path(__file__).resolve().parents[1]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings_handlers") is None,
    reason="no mkdocstrings here: pip install 'tvm-ipc[docs]'",
)
in_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium here: apt-get install chromium"
)
REPOSITORY = "https://example.org/us/tvm-ipc"


def packages_but_ours(folder: Path) -> None:
    """Link the installed packages, but tvm_ipc and TVM; files `.pth` have no effect there."""
    folder.mkdir()
    for entry in sys.path:
        if Path(entry).name in ("site-packages", "dist-packages"):
            for path in Path(entry).iterdir():
                link = folder / path.name
                if "tvm" not in path.name and path.suffix != ".pth" and not link.exists():
                    link.symlink_to(path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site that is built without tvm_ipc and TVM, of a checkout with a docstring of its own."""
    folder = tmp_path_factory.mktemp("site")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in ("mkdocs.yml", "pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, checkout)
    for name in ("docs", "examples", "tvm_ipc"):
        shutil.copytree(
            ROOT / name,
            checkout / name,
            ignore=shutil.ignore_patterns("*.so", "*.pyi", "csrc", "lib", "__pycache__"),
        )
    project = (checkout / "pyproject.toml").read_text()
    project = re.sub(r'(?m)^Source = ".*"$', f'Source = "{REPOSITORY}"', project)
    (checkout / "pyproject.toml").write_text(project)
    source = checkout / "tvm_ipc" / "transform" / "require_workers.py"
    head = 'class RequireWorkers(ModulePass):\n    """'
    text = source.read_text()
    assert head in text
    source.write_text(text.replace(head, head + "Only here. "))
    packages_but_ours(folder / "packages")
    # As the script `mkdocs` starts it: without the current directory in `sys.path`.
    program = "import sys; sys.path.remove(''); from mkdocs.__main__ import cli; cli()"
    paths = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ["PATH"]]
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, "build", "--strict", "--site-dir", folder / "built"],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={
            "PATH": os.pathsep.join(paths),
            "HOME": str(folder),
            "PYTHONPATH": str(folder / "packages"),
            "NO_MKDOCS_2_WARNING": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return folder / "built"


def test_the_site_documents_the_checkout(site: Path) -> None:
    page = (site / "reference" / "passes" / "RequireWorkers.html").read_text()
    assert "Only here. " in page
    assert "tvm-ipc run" in (site / "reference" / "commands.html").read_text()


def test_operators_and_session_methods_of_collectives_are_documented(site: Path) -> None:
    """No file of a checkout has their signatures before it is built."""
    operators = (site / "reference" / "comm.html").read_text()
    names = (site / "reference" / "api.html").read_text()
    for kind in KINDS.values():
        assert f'id="tvm_ipc.comm.{kind.name}"' in operators
        assert not kind.method_doc or f'id="tvm_ipc.Session.{kind.method}"' in names
    assert "the axis of <code>x</code> that is split" in operators


def test_each_pass_has_a_page_with_a_program_before_and_after_it(site: Path) -> None:
    homes = (tvm_ipc.transform, tvm_ipc.spmd, tvm_ipc.cpu, tvm_ipc.gpu)
    exported = [getattr(home, name) for home in homes for name in home.__all__]
    passes = [
        one for one in exported if isinstance(one, type) and issubclass(one, tvm.ir.transform.Pass)
    ]
    names = {one.__name__ for one in passes}
    table = (site / "reference" / "transform.html").read_text()
    guide = (site / "passes.html").read_text()
    pages = {path.stem: path.read_text() for path in (site / "reference" / "passes").iterdir()}
    assert len(names) > 20
    assert pages.keys() == names
    for name, page in pages.items():
        assert f'href="passes/{name}.html"' in table
        # Its own sketches are in the example and in the table of hazards.
        if name != "VerifyCrossRankSafety":
            assert re.search(r"<p>Before.*?</p>\s*<div class=\"[^\"]*highlight", page, re.S), name
            assert re.search(r"<p>After.*?</p>\s*<div class=\"[^\"]*highlight", page, re.S), name
    assert guide.count('href="reference/passes/') >= 17


def test_links_to_the_repository_are_those_of_the_project(site: Path) -> None:
    pages = {
        "gotchas.html": "docs/gotchas.md",
        "reference/passes/RequireWorkers.html": "tvm_ipc/transform/require_workers.py",
    }
    for page, source in pages.items():
        text = (site / page).read_text()
        assert f'href="{REPOSITORY}/edit/main/{source}"' in text
        assert f'href="{REPOSITORY}"' in text


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(r'<(?:script|img)[^>]* src="https?:', page.read_text()), page
        assert not re.search(r'<link[^>]*stylesheet[^>]* href="https?:', page.read_text()), page


Parameters = list[tuple[str, str, str | None, str]]


@pytest.fixture
def parameters(tmp_path: Path) -> Callable[[str, str], Parameters]:
    """Reads a docstring: name, type, default and description of each parameter."""
    griffe: Any = pytest.importorskip("griffe")

    def read(text: str, signature: str) -> Parameters:
        body = textwrap.indent(f'"""Do it.\n\nParameters\n----------\n{text}\n"""\n', "    ")
        (tmp_path / "example.py").write_text(f"def f({signature}):\n{body}")
        extensions = griffe.load_extensions(str(ROOT / "docs" / "site" / "docstrings.py"))
        module = griffe.load("example", search_paths=[tmp_path], extensions=extensions)
        section = module["f"].docstring.parse("numpy")[1]
        return [
            (one.name, str(one.annotation), one.default, one.description) for one in section.value
        ]

    return read


def test_names_of_a_group_have_their_own_types_and_defaults(
    parameters: Callable[[str, str], Parameters],
) -> None:
    text = "a, b : the sizes, or None\n    for all.\nc : a name."
    assert parameters(text, "a: int, b: str | None = None, *, c: str = 'x'") == [
        ("a", "int", None, "the sizes, or None\nfor all."),
        ("b", "str | None", "None", "the sizes, or None\nfor all."),
        ("c", "str", "'x'", "a name."),
    ]


def test_types_in_docstrings_are_those_of_numpy(
    parameters: Callable[[str, str], Parameters],
) -> None:
    text = "a, b : int\n    The sizes.\nc\n    A name."
    assert parameters(text, "a: int, b: int = 2, *, c: str = 'x'") == [
        ("a", "int", None, "The sizes."),
        ("b", "int", "2", "The sizes."),
        ("c", "str", "'x'", "A name."),
    ]


def command(folder: Path, *more: str) -> list[str]:
    """Return the command that starts the browser, which leaves its files in a folder."""
    return [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={folder}", *more),
    ]


@in_browser
def test_search_works_in_pages_opened_from_a_folder(site: Path, tmp_path: Path) -> None:
    url = f"{(site / 'reference' / 'api.html').as_uri()}?q=allreduce"
    options = ("--dump-dom", "--virtual-time-budget=10000", url)
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, timeout=60)
    page = done.stdout
    assert re.search(r"\d+ matching documents", page)
    assert "communication.html?h=allreduce" in page


#: Opens each page in a frame, and lists what does not fit into it at each width.
LOOK = """<!doctype html><meta charset="utf-8"><body><script>
const seen = {};
(async () => {
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    document.body.append(frame);
    for (const width of [1280, 390]) {
      frame.style = `width: ${width}px; height: 900px; border: 0`;
      if (!frame.src) {
        await new Promise((loaded) => { frame.onload = loaded; frame.src = "/" + page; });
      }
      await new Promise((done) => setTimeout(done, 50));
      const inside = frame.contentDocument, bad = [];
      if (inside.documentElement.scrollWidth > width) bad.push("the page");
      if (width > 1000) for (const e of inside.querySelectorAll(".md-content pre > code")) {
        if (e.checkVisibility() && e.scrollWidth > e.clientWidth + 1) bad.push(e.textContent);
      }
      // Tables and code scroll on their own where a screen is narrow.
      for (const e of inside.querySelectorAll(".md-content *")) {
        if (!e.closest("pre, .md-typeset__scrollwrap, svg, .md-clipboard") && e.checkVisibility()
            && e.getBoundingClientRect().right > width + 1) bad.push(e.outerHTML.slice(0, 200));
      }
      if (bad.length) seen[`${width} ${page}`] = bad;
    }
    frame.remove();
  }
  fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
})();
</script>"""


class Pages(http.server.SimpleHTTPRequestHandler):
    """Serves files, and takes what the browser has seen."""

    seen: queue.Queue[Any] = queue.Queue()

    def do_POST(self) -> None:
        """Take it."""
        size = int(self.headers["Content-Length"])
        self.seen.put(json.loads(self.rfile.read(size)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@in_browser
@pytest.mark.slow
def test_pages_fit_on_desktops_and_phones(site: Path, tmp_path: Path) -> None:
    """On desktops no code is cut either."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    pages.remove("404.html")
    assert len(pages) > 60
    (site / "look.html").write_text(LOOK.replace("PAGES", json.dumps(pages)))
    handler = functools.partial(Pages, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/look.html"
        browser = subprocess.Popen(
            command(tmp_path, "--remote-debugging-port=0", "--window-size=1400,1000", url),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            seen = Pages.seen.get(timeout=300)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
    (site / "look.html").unlink()
    assert seen == {}


def test_the_picture_of_the_layers_is_on_its_page(site: Path) -> None:
    assert 'src="pictures/layers.svg"' in (site / "internals.html").read_text()
    assert (site / "pictures" / "layers.svg").is_file()
