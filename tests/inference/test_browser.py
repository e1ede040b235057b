"""The report and TensorBoard as a browser shows them: headless Chromium, to which nothing but this machine exists."""

import json
import logging
import os
import shutil
import time
from functools import partial
from urllib.request import ProxyHandler, build_opener

import pytest

from vitlab.__main__ import main
from vitlab.runs.training import run_training

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ARGUMENTS = (
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--enable-unsafe-swiftshader",  # without it TensorBoard's charts leave a warning
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--no-first-run",
    "--no-proxy-server",
    *(("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()),
)
PATIENCE_S = 120

# All text and all pictures of a page, those in shadow roots of web components as well.
TEXT = """
let text = "";
const walk = (node) => {
  for (const child of node.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) text += " " + child.textContent;
    else if (child.nodeType === Node.ELEMENT_NODE && !["STYLE", "SCRIPT", "NOSCRIPT"].includes(child.tagName)) {
      if (child.shadowRoot) walk(child.shadowRoot);
      walk(child);
    }
  }
};
walk(document.body);
return text.replace(/\\s+/g, " ");
"""
PICTURES = """
const found = [];
const walk = (node) => {
  for (const element of node.querySelectorAll("*")) {
    if (element.tagName === "IMG") found.push([element.src.slice(0, 60), element.complete && element.naturalWidth]);
    if (element.shadowRoot) walk(element.shadowRoot);
  }
};
walk(document);
return found;
"""


TABS = {
    "scalars": ("val/top1", "val/loss", "val/ece"),
    "images": ("train/batch", "val/confusion", "val/attention", "val/mistakes"),
    "custom_scalars": ("scores", "top-1", "calibration error", "optimization", "gradient norm", "speed"),
    "pr_curves": ("val/pr", "val/pr/green"),
}


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, 1300 wide, whose log holds the console and every request."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_script_timeout(PATIENCE_S)
    yield driver
    driver.quit()


def look(browser, *, dark=False, width=1300, height=1000):
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
    )
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wait_for(what):
    """Wait until a function gives something, and give it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def requests(browser):
    """Give the addresses that were asked for since the last call; `data:` is none."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = (m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent")
    return [url for url in sent if not url.startswith("data:")]


def complaints(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="module")
def report(browser, model_file, odd_images, tmp_path_factory):
    """Open the report of a random network, and give the page's address."""
    folder = tmp_path_factory.mktemp("report")
    line = ["evaluate", str(model_file), "--data", str(odd_images), "--split", "all", "--workers", "0"]
    assert main([*line, "--report", str(folder)]) == 0
    requests(browser), complaints(browser)
    address = (folder / "index.html").as_uri()
    browser.get(address)
    return address


def test_report_asks_for_nothing_shows_its_images_and_leaves_the_console_empty(browser, report):
    assert requests(browser) == [report]
    assert complaints(browser) == []
    pictures = browser.execute_script(PICTURES)
    assert len(pictures) > 40  # two of each mistake
    assert all(pictures[i][1] >= 200 for i in range(40))
    assert all(width for _, width in pictures)  # some images of the data check are a pixel wide
    assert len(browser.find_elements("tag name", "svg")) == 3


def column(browser, place):
    script = (
        "return [...document.querySelectorAll('#per-class tbody tr')].map((row) => row.cells[arguments[0]].innerText)"
    )
    return browser.execute_script(script, place)


def test_report_table_sorts_by_mouse_and_keyboard_and_says_so(browser, report):
    heads = browser.find_elements("css selector", "#per-class th")
    names = column(browser, 0)
    assert names == ["zebra", "ant", "mole", "bee", "owl", "elk", "cow"]  # the model's own order
    heads[0].find_element("tag name", "button").click()
    assert column(browser, 0) == sorted(names)
    assert heads[0].get_attribute("aria-sort") == "ascending"
    button = heads[3].find_element("tag name", "button")
    button.send_keys("\ue007")  # Enter

    def numbers():
        return [float(text.removesuffix("\xa0%")) for text in column(browser, 3) if text != "–"]

    assert heads[0].get_attribute("aria-sort") is None
    assert numbers() == sorted(numbers())
    assert len(set(numbers())) > 1
    button.send_keys(" ")
    assert heads[3].get_attribute("aria-sort") == "descending"
    assert numbers() == sorted(numbers(), reverse=True)
    assert sorted(column(browser, 0)) == sorted(names)
    assert complaints(browser) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1300, 360])
def test_report_is_readable_light_and_dark_wide_and_narrow(browser, report, dark, width):
    look(browser, dark=dark, width=width)
    colors = browser.execute_script(
        "const rgb = (text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number);"
        "const style = getComputedStyle(document.body); return [rgb(style.backgroundColor), rgb(style.color)]"
    )
    paper, ink = (sum(color) / 3 for color in colors)
    assert (paper < 60 and ink > 200) if dark else (paper > 230 and ink < 60)
    # Wide tables and figures scroll in their own frames, never the page.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert complaints(browser) == []


def test_report_shows_a_number_beside_a_long_name_on_a_narrow_screen(browser, report):
    look(browser, width=390)
    script = """
    const cell = document.querySelector("#per-class tbody td");
    cell.textContent = "x".repeat(200);
    return cell.nextElementSibling.getBoundingClientRect().right;
    """
    right = browser.execute_script(script)
    browser.get(report)
    assert right < 390


@pytest.fixture(scope="module")
def tensorboard(color_config, noise_folder, tmp_path_factory):
    """Serve a run on a free port of this machine, by a thread that ends with the tests; give the address."""
    program = pytest.importorskip("tensorboard.program")
    changes = {"monitor__embeddings": True, "data__root": str(noise_folder)}  # of noise some mistakes are left
    run = run_training(color_config(tmp_path_factory.mktemp("shown") / "run", **changes))
    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(run), "--host", "127.0.0.1", "--port", "0", "--load_fast", "false"])
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    return server.launch()


def test_tensorboard_lists_scalars_and_shows_images(browser, tensorboard):
    look(browser, height=1600)
    requests(browser), complaints(browser)
    asked = []
    for tab, expected in TABS.items():
        browser.get("about:blank")
        browser.get(f"{tensorboard}#{tab}")
        missing = partial(missing_tags, browser, expected)
        assert wait_for(lambda missing=missing: not missing()), (tab, missing())
        if tab == "images":
            assert wait_for(lambda: [width > 90 for _, width in browser.execute_script(PICTURES)] == [True] * 4)
        asked += requests(browser)
    assert any("plugin/images/individualImage" in url for url in asked)
    assert all(url.startswith((tensorboard, "about:", "blob:")) for url in asked), asked
    assert [entry for entry in complaints(browser) if "Three.js" not in entry["message"]] == []


def missing_tags(browser, expected):
    text = browser.execute_script(TEXT)
    return [tag for tag in expected if tag not in text]


def test_tensorboard_gives_the_projector_features_names_and_pictures(tensorboard):
    def get(route):
        opener = build_opener(ProxyHandler({}))
        with opener.open(f"{tensorboard}data/plugin/projector/{route}", timeout=PATIENCE_S) as answer:
            return answer.read()

    (run,) = json.loads(get("runs"))
    (shown,) = json.loads(get(f"info?run={run}"))["embeddings"]
    assert shown["tensorShape"] == [15, 16]
    assert len(get(f"tensor?run={run}&name={shown['tensorName']}")) == 15 * 16 * 4
    assert get(f"metadata?run={run}&name={shown['tensorName']}").startswith(b"class\timage\nblue\t")
    assert get(f"sprite_image?run={run}&name={shown['tensorName']}").startswith(b"\x89PNG")
