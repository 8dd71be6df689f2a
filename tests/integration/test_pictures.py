"""`draw`'s files in a real browser: nothing overlaps or is cut, everything can be read, light and
dark, and nothing is loaded or run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import State
from kata_pin.options.pictures import page, svg
from tests.support.chromium import Browser, browser, pixels
from tests.support.commandline import run
from tests.support.daemon import private_node
from tests.unit.cli import documents as docs
from tests.unit.cli.proved import owned, proved
from tests.unit.conftest import Sockets

CPUS = sorted(os.sched_getaffinity(0))

EVIL = "</text><script>evil=1</script><img src=http://127.0.0.1:1/x onerror='evil=2'>"

LAYOUT = """(() => {
  const wrong = [];
  const shown = [...document.querySelectorAll('svg.picture text')];
  for (const one of shown) {
    const tile = one.closest('svg');
    const box = one.getBBox();
    const [width, height] = tile.classList.contains('picture')
      ? [tile.viewBox.baseVal.width, 1e9]
      : [tile.width.baseVal.value, tile.height.baseVal.value];
    if (box.x < 0 || box.x + box.width > width || box.y + box.height > height + 2)
      wrong.push(`cut: ${one.textContent}: ${box.x + box.width} of ${width}`);
  }
  const places = shown.map(one => one.getBoundingClientRect());
  for (let n = 0; n < places.length; n++)
    for (let m = n + 1; m < places.length; m++) {
      const a = places[n], b = places[m];
      if (a.left < b.right - 1 && b.left < a.right - 1 &&
          a.top < b.bottom - 4 && b.top < a.bottom - 4)
        wrong.push(`overlap: ${shown[n].textContent} / ${shown[m].textContent}`);
    }
  return wrong;
})()"""

DOUBLED = """[...document.querySelectorAll('[id]')].map(one => one.id)
  .filter((one, place, all) => all.indexOf(one) != place)"""

CONTRAST = """(() => {
  const light = colour => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(x => x / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const wrong = [];
  for (const one of document.querySelectorAll('svg.picture text')) {
    const edge = one.closest('svg').querySelector(':scope > .edge');
    const ground = edge ? getComputedStyle(edge).fill
      : getComputedStyle(document.querySelector('svg.picture')).backgroundColor;
    const [a, b] = [light(getComputedStyle(one).fill), light(ground)].sort((x, y) => x - y);
    const ratio = (b + 0.05) / (a + 0.05);
    if (ratio < 4.5) wrong.push(`${one.textContent}: ${ratio}`);
  }
  return wrong;
})()"""


def crowded(count: int, *, pods: int) -> State:
    """Return a node full of pods with long names, each exclusive to some pCPUs."""
    cores = count // 2 if count > 2 else count
    each = max(1, cores // pods)
    sandboxes = []
    for n in range(min(pods, cores)):
        cpus = list(range(n * each, (n + 1) * each))
        threads = [
            docs.thread(1000 * n + i, "vcpu", str(cpu), vcpu=i) for i, cpu in enumerate(cpus)
        ]
        mine = str(CpuSet(cpus))
        name = f"a-namespace-with-a-long-name/deployment-7f9c6d5b8-x{n:04}"
        sandboxes.append(docs.sandbox(name, mine, *threads, exclusive=mine))
    sharers = [
        docs.sandbox(f"数据库/共享-{n}", str(count - 1)) for n in range(2 if count > 2 else 0)
    ]
    late = docs.sandbox("other/late", "0", state="conflict", exclusive="0")
    return docs.state(*sandboxes, *sharers, late, cpus=count, present=f"0-{count}", kubelet=None)


def wild() -> State:
    """Return a node whose pod is named to break out."""
    vm = docs.sandbox(EVIL, "4-5", docs.thread(1, "vcpu", "4", vcpu=0), exclusive="4")
    zalgo = docs.sandbox("z\u0489\u0316\u0317" * 50, "6", exclusive="6")
    return docs.state(vm, zalgo, docs.sandbox("שלום/عالم", "7", exclusive="7"), hostname=EVIL)


STATES = {
    "2": crowded(2, pods=1),
    "8": crowded(8, pods=2),
    "64": crowded(64, pods=8),
    "256": crowded(256, pods=100),
    "pools": docs.allotted(),
    "wild": wild(),
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all of them: a start takes half a second."""
    with browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("kind", ["svg", "html"])
def test_pictures_can_be_read(
    chromium: Browser, tmp_path: Path, name: str, kind: str, *, dark: bool
) -> None:
    """In both themes no text is cut or covered by another, and each stands out from its ground."""
    file = tmp_path / f"node.{kind}"
    file.write_text((svg if kind == "svg" else page).document(STATES[name]))
    chromium.show(file, dark=dark)
    assert chromium.evaluate("document.querySelectorAll('svg.tile').length") > 1
    assert chromium.evaluate(DOUBLED) == []
    assert chromium.evaluate(LAYOUT) == []
    assert chromium.evaluate(CONTRAST) == []
    assert chromium.requests == [file.as_uri()]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_proof_can_be_read(chromium: Browser, tmp_path: Path, *, dark: bool) -> None:
    """The page of `prove`: timelines and histogram as well."""
    file = tmp_path / "proof.html"
    file.write_text(page.proof_document(proved(irq=True), owned()))
    chromium.show(file, dark=dark)
    bars = "[...document.querySelectorAll('.bar')].map(one => one.dataset.cpu)"
    assert chromium.evaluate(bars) == ["4", "5", "6"]
    foreign = "document.querySelector('.bar[data-cpu=\"4\"] .run-foreign').getBBox().width"
    assert 0 < chromium.evaluate(foreign) < 32
    assert chromium.evaluate(DOUBLED) == []
    assert chromium.evaluate(LAYOUT) == []
    assert chromium.evaluate(CONTRAST) == []
    assert chromium.requests == [file.as_uri()]


PAGES = {"prove": lambda: page.proof_document(proved(irq=True), owned())} | {
    f"draw-{name}": (lambda state=state: page.document(state)) for name, state in STATES.items()
}

LOOKS = [(width, dark, "screen") for width in (1100, 400) for dark in (False, True)]
PAPER_WIDTH = 980
"""Pixels of a letter or A4 sheet, landscape, without its margins."""

WIDE = """[...document.querySelectorAll('table, p, h1, h2')]
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => `${one.tagName}: ${one.textContent.slice(0, 60)}`)"""

CUT = """[...document.querySelectorAll('.wide')]
  .filter(one => one.querySelector('table') && one.scrollWidth > one.clientWidth + 1)
  .map(one => one.textContent.slice(0, 60))"""

BROKEN = """(() => {
  const wrong = [];
  for (const one of document.querySelectorAll('td bdi, th bdi')) {
    const text = one.firstChild;
    for (const word of text.data.matchAll(/[a-z0-9.]{2,24}(?= |$)/gi)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (range.getClientRects().length > 1 && !one.classList.contains('long'))
        wrong.push(`${word[0]} of ${text.data}`);
    }
  }
  return wrong;
})()"""


@pytest.mark.parametrize(("width", "dark", "media"), [*LOOKS, (PAPER_WIDTH, False, "print")])
@pytest.mark.parametrize("name", PAGES)
def test_tables_fit_the_page(
    chromium: Browser, tmp_path: Path, name: str, width: int, media: str, *, dark: bool
) -> None:
    """On a desk, a telephone and paper no table is wider than the page and no word is broken."""
    file = tmp_path / "page.html"
    file.write_text(PAGES[name]())
    chromium.show(file, dark=dark, width=width, media=media)
    assert chromium.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert chromium.evaluate(WIDE) == []
    assert chromium.evaluate(CUT) == []
    assert chromium.evaluate(BROKEN) == []
    rows = chromium.evaluate("document.querySelectorAll('tbody tr').length")
    assert rows >= 2


@pytest.mark.parametrize("name", PAGES)
def test_pictures_fit_a_desk_and_paper(chromium: Browser, tmp_path: Path, name: str) -> None:
    """There a picture shrinks; on a telephone it scrolls, because it could not be read."""
    file = tmp_path / "page.html"
    file.write_text(PAGES[name]())
    widest = "Math.max(...[...document.querySelectorAll('svg.picture')].map(s => s.clientWidth))"
    chromium.show(file, width=1100)
    assert chromium.evaluate(widest) <= 1100
    chromium.show(file, width=PAPER_WIDTH, media="print")
    assert chromium.evaluate(widest) <= PAPER_WIDTH
    chromium.show(file, width=400)
    assert chromium.evaluate(widest) >= 700


@pytest.mark.root
def test_prove_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured here, on a pCPU that is said to be exclusive and on which everything runs."""
    state = docs.state(
        docs.sandbox("shop/web", "0", exclusive="0"), cpus=len(os.sched_getaffinity(0))
    )
    settings = tmp_path / "config.yaml"
    settings.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    file = tmp_path / "proof.html"
    daemon = Sockets(tmp_path, {"state": lambda _: state})
    try:
        given = ["prove", "--for", "1s", "--html", str(file), "--config", str(settings)]
        assert run(given) == 3
        assert "VIOLATED" in capsys.readouterr().out
        assert 'class="verdict bad"' in file.read_text()
        assert run([*given[:-3], str(tmp_path / "no" / "x"), *given[-2:]]) == 1
        assert "No such file or directory" in capsys.readouterr().err
    finally:
        daemon.close()


@pytest.mark.root
@pytest.mark.qemu
@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_a_real_node_is_drawn_with_its_intruder(tmp_path: Path) -> None:
    """A real VM, and a busy process on its exclusive pCPU, which is marked and named."""
    file = tmp_path / "node.svg"
    with private_node() as node:
        node.start()
        with node.pod("p1") as pod:
            pod.announce()
            pod.create("c1", str(CPUS[-1]), exclusive=True)
            node.wait_state("p1", "ok")
            with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as intruder:
                try:
                    os.sched_setaffinity(intruder.pid, {CPUS[-1]})
                    shown = node.cli("draw", "--for", "1s")
                    node.cli("draw", "--for", "1s", "--svg", str(file))
                finally:
                    intruder.kill()
    assert "! foreign: " in shown.stdout
    assert f"sh (pid {intruder.pid}" in shown.stdout
    tiles = {
        one.get("data-cpu"): one
        for one in ElementTree.parse(file).iter()
        if "tile" in one.get("class", "")
    }
    marked = tiles[str(CPUS[-1])]
    assert {"exclusive", "problem"} <= set(marked.get("class", "").split())
    assert any("% foreign" in (one.text or "") for one in marked.iter())
    assert "problem" not in tiles[str(CPUS[0])].get("class", "")


@pytest.mark.parametrize("kind", ["svg", "html"])
def test_names_do_nothing(chromium: Browser, tmp_path: Path, kind: str) -> None:
    """Markup in names is shown, not followed."""
    file = tmp_path / f"node.{kind}"
    file.write_text((svg if kind == "svg" else page).document(STATES["wild"]))
    chromium.show(file)
    assert chromium.evaluate("typeof evil") == "undefined"
    assert chromium.evaluate("document.querySelectorAll('script, img, foreignObject').length") == 0
    texts = "[...document.querySelectorAll('svg title')].map(one => one.textContent)"
    assert any(EVIL in one for one in chromium.evaluate(texts))
    assert chromium.requests == [file.as_uri()]


def hexadecimal(colour: tuple[int, int, int]) -> str:
    """Return a colour as CSS has it."""
    return "#" + "".join(f"{one:02x}" for one in colour)


@pytest.mark.parametrize(
    ("dark", "colours"), [(False, svg.LIGHT), (True, svg.DARK)], ids=["light", "dark"]
)
def test_a_screenshot_shows_the_uses(
    chromium: Browser, tmp_path: Path, colours: svg.Theme, *, dark: bool
) -> None:
    """The pixels of a tile have the owner's colours; strips of other uses have their patterns."""
    file = tmp_path / "node.svg"
    file.write_text(svg.document(docs.allotted()))
    chromium.show(file, dark=dark)
    seen: dict[int, list[str]] = {}
    for cpu in (0, 1, 3, 4, 6):
        script = (
            f"""(() => {{ const r = document.querySelector('[data-cpu="{cpu}"]')"""
            """.getBoundingClientRect();
            return {x: r.x, y: r.y, width: 30, height: r.height}})()"""
        )
        width, height, found = pixels(chromium.screenshot(chromium.evaluate(script)))
        assert width == 30
        assert height > 80
        strip = [hexadecimal(found[y * width + x]) for y in range(8, 80) for x in range(4, 8)]
        seen[cpu] = strip
        ground = colours.owners[1] if cpu == 6 else colours.plain
        assert hexadecimal(found[40 * width + 25]) == ground[0]
    assert set(seen[6]) == {colours.owners[1][1]}  # exclusive: the whole strip
    assert set(seen[4]) == {colours.plain[0]}  # free: none
    patterns = [tuple(seen[cpu]) for cpu in (0, 1, 3)]
    assert len(set(patterns)) == 3
    assert all(len(set(one)) > 1 for one in patterns)
